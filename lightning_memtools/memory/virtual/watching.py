"""All that is replaced or hooked in torch while a device is active, begun and ended as one."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.virtual import surroundings
from lightning_memtools.memory.virtual.compilation import EagerCompilation
from lightning_memtools.memory.virtual.loaders import watch_loaders
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.memory.virtual.substitutions import behave_like_cuda


class Watching:
    """Watches what an accounting mode cannot see by itself.

    Args:
        find: Finds the accounting mode of the thread it is called in.
        seen: Told of each optimizer that takes a step.
        run_counted: Runs a new thread's work with an accounting mode.
        cuda_like: Take CUDA's path where CPU tensors take another.
    """

    def __init__(
        self,
        find: surroundings.Find,
        *,
        seen: Callable[[Optimizer], None],
        run_counted: Callable[[Callable[[], None]], None],
        cuda_like: bool,
    ) -> None:
        self._find = find
        self._seen = seen
        self._run_counted = run_counted
        self._cuda_like = cuda_like
        self._patches = Patches()
        self._hooks: list[RemovableHandle] = []
        self._compilation = EagerCompilation()

    def begin(self) -> None:
        """Replace and hook."""
        patches, find = self._patches, self._find
        surroundings.watch_modules(patches, find, self._compilation.say)
        surroundings.watch_storages(patches, find)
        surroundings.watch_threads(patches, find, self._run_counted)
        watch_loaders(patches, find)
        self._compilation.begin(patches)
        if self._cuda_like:
            behave_like_cuda(patches)
        self._hooks += surroundings.watch_registrations(find)
        self._hooks += surroundings.watch_optimizers(find, self._seen)

    def end(self) -> None:
        """Leave torch as it was; twice does no harm."""
        self._patches.undo()
        self._compilation.end()
        while self._hooks:
            self._hooks.pop().remove()
