"""Watches modules, optimizers, storages and threads for the device, beside the operators that a mode sees.

Each `watch_...` replaces functions or adds hooks, which do nothing in a thread without an accounting mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.cuda_ops.autocast import cuda_autocast
from lightning_memtools.memory.virtual.accounting_mode import AccountingMode, FindMode
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.loaders import watch_loaders
from lightning_memtools.memory.virtual.module_scopes import OPTIMIZER, OUTSIDE, ModuleScopes
from lightning_memtools.memory.virtual.patches import EagerCompilation, Patches, allow_subclasses, behave_like_cuda


def watch_modules(patches: Patches, find: FindMode, say_eager: Callable[[], None]) -> None:
    """Patch torch to report module calls to the accounting mode from `find`. Call `say_eager` for compiled modules."""

    def make(original: Any) -> Any:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            mode = find()
            if mode is None:
                return original(self, *args, **kwargs)
            if type(self).__name__ == "OptimizedModule":
                say_eager()
            depth = mode.enter_module(self, args, kwargs)
            try:
                return original(self, *args, **kwargs)
            finally:
                mode.place.leave_to(depth)

        return call

    patches.replace(nn.Module, "__call__", make)


def watch_registrations(find: FindMode) -> list[RemovableHandle]:
    """Add hooks that set the category of new parameters and buffers in the accounting mode that `find` returns."""

    def note(category: Category) -> Callable[[nn.Module, str, Any], None]:
        def hook(module: nn.Module, name: str, tensor: Any) -> None:
            del name
            mode = find()
            if mode is not None and isinstance(tensor, torch.Tensor):
                mode.note(tensor, category, type(module).__name__)

        return hook

    return [
        module_hooks.register_module_parameter_registration_hook(note(Category.PARAMETER)),
        module_hooks.register_module_buffer_registration_hook(note(Category.BUFFER)),
    ]


# They make counts of steps with `torch.zeros(())`, on the device of the parameters only where they are capturable; most
# others use `torch.tensor`.
_COUNTING_ON_HOST = (torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adadelta)


def watch_optimizers(find: FindMode, seen: Callable[[Optimizer], None]) -> list[RemovableHandle]:
    """Hook all optimizer steps: tell the accounting mode that `find` returns, and call `seen` with the optimizer."""

    def begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = find()
        if mode is None:
            return None
        seen(optimizer)
        place = mode.place
        depth = len(place.scopes)
        place.scopes.append(OPTIMIZER)
        place.counts_on_host = isinstance(optimizer, _COUNTING_ON_HOST) and not any(
            group.get("capturable") for group in optimizer.param_groups
        )
        # args[0] is the optimizer itself.
        if len(args) > 1 and callable(args[1]):
            return (args[0], _outside(place, depth, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _outside(place, depth, kwargs["closure"])}
        return None

    def end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del optimizer, args, kwargs
        mode = find()
        if mode is not None:
            mode.place.leave_step()

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def _outside(place: ModuleScopes, depth: int, closure: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        place.scopes.append(OUTSIDE)
        try:
            out = closure()
        except BaseException:
            # The error ends the step as well, and torch will not call its post hook.
            place.leave_to(depth)
            raise
        place.leave_to(depth + 1)
        return out

    return run


def watch_storages(patches: Patches, find: FindMode) -> None:
    """Patch storages: `resize_` counts what it adds, and `copy_` no temporary tensors. `find` returns the mode."""

    def make_resize(original: Any) -> Any:
        def resize_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            mode = find()
            if mode is not None:
                mode.enter_resized(self)
            return out

        return resize_

    def make_copy(original: Any) -> Any:
        # torch copies storages through temporary tensors, which would count although no memory is new. deepcopy copies
        # a storage and then makes a tensor of it, which counts.
        def copy_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            mode = find()
            if mode is None:
                return original(self, *args, **kwargs)
            with mode.silence():
                return original(self, *args, **kwargs)

        return copy_

    patches.replace(torch.UntypedStorage, "resize_", make_resize)
    patches.replace(torch.UntypedStorage, "copy_", make_copy)


def watch_threads(patches: Patches, find: FindMode, run_counted: Callable[[Callable[[], None]], None]) -> None:
    """Patch Thread.start: if `find` returns an accounting mode, `run_counted` runs and counts the new thread's work."""

    def make(original: Any) -> Any:
        def start(self: threading.Thread) -> None:
            mode = find()
            if mode is not None and not mode.silent:
                run = self.run

                def run_once() -> None:
                    del self.run
                    run_counted(run)

                self.run = run_once  # type: ignore[method-assign]
            original(self)

        return start

    patches.replace(threading.Thread, "start", make)


class DeviceHooks:
    """Patches and hooks that report events to an accounting mode: module calls, optimizer steps, batches, threads.

    Args:
        find: Returns the accounting mode of the current thread.
        seen: Called with each optimizer that takes a step.
        run_counted: Runs a new thread's work under an accounting mode.
        cuda_like: Whether to make dropout, autocast and optimizers behave as on CUDA.
    """

    def __init__(
        self,
        find: FindMode,
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
        self._autocast = ExitStack()

    def begin(self) -> None:
        """Apply the patches and add the hooks."""
        patches = self._patches = Patches()

        def find() -> AccountingMode | None:
            return None if patches.undone else self._find()

        watch_modules(patches, find, self._compilation.say)
        watch_storages(patches, find)
        watch_threads(patches, find, self._run_counted)
        watch_loaders(patches, find)
        allow_subclasses(patches)
        self._compilation.begin(patches)
        if self._cuda_like:
            behave_like_cuda(patches)
            self._autocast.enter_context(cuda_autocast())
        self._hooks += watch_registrations(find)
        self._hooks += watch_optimizers(find, self._seen)

    def end(self) -> None:
        """Undo the patches and remove the hooks. Idempotent."""
        self._autocast.close()
        self._patches.undo()
        self._compilation.end()
        while self._hooks:
            self._hooks.pop().remove()
