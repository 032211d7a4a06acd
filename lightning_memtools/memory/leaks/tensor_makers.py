"""Notes which module made a tensor, and in which step, for leaks whose holder cannot be found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from lightning_memtools._torch import tree_leaves
from lightning_memtools.memory.owned import storage_of


class TensorMakers:
    """Notes the innermost module that returned each tensor while it watches, without keeping a tensor alive.

    Args:
        step: Returns the number of the current training step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._names: Mapping[int, str] = {}
        self._made: dict[int, tuple[weakref.ref[UntypedStorage], str]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, names: Mapping[int, str]) -> None:
        """Begin to watch all modules.

        Args:
            names: The names of modules by identity.
        """
        self._names = names
        if self._handle is None:
            self._handle = register_module_forward_hook(self._note)

    def stop(self) -> None:
        """Stop watching and forget everything. Twice does no harm."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._made.clear()

    def maker_of(self, tensor: Tensor) -> str:
        """Return the module and the step that made a tensor; "" where none was seen."""
        found = storage_of(tensor)
        reference, maker = self._made.get(found[0], (None, "")) if found is not None else (None, "")
        return maker if found is not None and reference is not None and reference() is found[1] else ""

    def _note(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            found = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if found is None:
                continue
            key, storage = found
            known = self._made.get(key)
            if known is None or known[0]() is not storage:  # modules around the innermost one return the same
                maker = f"{self._names.get(id(module), type(module).__name__)} in step {self._step()}"
                self._made[key] = weakref.ref(storage, lambda _, key=key: self._made.pop(key, None)), maker  # type: ignore[misc]
