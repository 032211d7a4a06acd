"""The lines of code that make optimizers: what an optimizer keeps is charged to the line that made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.user_code import line_on_stack
from lightning_memtools.memory.virtual.patches import Patches


class OptimizerLines:
    """Context manager that records the line of code that creates each optimizer, and counts optimizer steps.

    Attributes:
        n_steps: The number of steps that optimizers have taken.
    """

    def __init__(self) -> None:
        self.n_steps = 0
        self._lines: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._running = ""
        self._patches = Patches()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        self._patches.replace(Optimizer, "__init__", self._noting)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_step(optimizer)),
            register_optimizer_step_post_hook(lambda *_: self._end_step()),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()

    def line_of(self, optimizer: Optimizer) -> str:
        """Return the line of code that created an optimizer; "" if it was not recorded."""
        return self._lines.get(optimizer, "")

    @property
    def running(self) -> str:
        """The line of code that created the optimizer whose `step` is running; "" if none is running."""
        return self._running

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            if not self._patches.undone:
                line = line_on_stack()
                if line is not None:
                    self._lines[optimizer] = line.described
            original(optimizer, *args, **options)

        return init

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._running = self.line_of(optimizer)

    def _end_step(self) -> None:
        self._running = ""
        self.n_steps += 1
