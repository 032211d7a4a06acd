"""Where the program is, and so what the memory is for that it takes there."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import Ledger
from lightning_memtools.memory.virtual.parts import flat, parts, storage_key

OUTSIDE = "(outside)"
OPTIMIZER = "(optimizer)"
BACKWARD = "(backward)"

_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether autograd runs this thread's code."""
    return _graph_task() != -1


def stores_gradient() -> bool:
    """Whether autograd is just giving a leaf its gradient."""
    return _graph_task() != -1 and isinstance(_current_node(), _AccumulateGrad)


class Place:
    """One thread's place in the program.

    Attributes:
        scopes: What is under way, innermost last: paths of modules that are being called, `OPTIMIZER` within an
            optimizer's step, `OUTSIDE` within a closure that a step calls.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.scopes: list[str] = []
        self._ledger = ledger

    def leave_to(self, depth: int) -> None:
        """What began at this depth has ended, well or not."""
        del self.scopes[depth:]

    def leave_step(self) -> None:
        """The optimizer's step that is under way here, if one is, has ended, well or not."""
        while self.scopes and self.scopes[-1] is OPTIMIZER:
            self.scopes.pop()

    @property
    def in_step(self) -> bool:
        """Whether this is an optimizer's own work."""
        return bool(self.scopes) and self.scopes[-1] is OPTIMIZER

    @property
    def caller(self) -> str | None:
        """The module that is being called; None outside of all."""
        scope = self.scopes[-1] if self.scopes else OUTSIDE
        return None if scope is OUTSIDE or scope is OPTIMIZER else scope

    def purpose(self, args: Any, kwargs: Any) -> tuple[Category, str]:
        """What a storage is for that an operator with these arguments makes now, and whom it is charged to."""
        scope = self.scopes[-1] if self.scopes else OUTSIDE
        if _graph_task() != -1:
            if isinstance(_current_node(), _AccumulateGrad):
                return Category.GRADIENT, BACKWARD
            return Category.ACTIVATION, BACKWARD if scope is OUTSIDE or scope is OPTIMIZER else scope
        if scope is OPTIMIZER:
            return Category.OPTIMIZER, scope
        if scope is not OUTSIDE or self._follows_activations(args, kwargs):
            return Category.ACTIVATION, scope
        return Category.OTHER, scope

    def _follows_activations(self, args: Any, kwargs: Any) -> bool:
        records = torch.is_grad_enabled()
        for tensor in (*flat(args), *flat(tuple(kwargs.values()))):
            if records and tensor.requires_grad:
                return True
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.ACTIVATION:
                    return True
        return False
