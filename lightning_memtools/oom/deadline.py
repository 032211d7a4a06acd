"""Ends tracing in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OutOfTimeError(Exception):
    """The time for checking is over."""


class Deadline:
    """A time by which the checks have to end.

    Args:
        seconds: How long from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, below 0 when it is over."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Go on if there is time.

        Raises:
            OutOfTimeError: There is none.
        """
        if self.left_s <= 0:
            raise OutOfTimeError("not reached within the time for checks")

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a step that is traced ends at the next module it calls once the time is over."""
        handles: list[Any] = [
            register_module_forward_pre_hook(lambda *_: self.check()),
            register_optimizer_step_pre_hook(lambda *_: self.check()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
