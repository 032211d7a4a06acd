"""A time by which the checks of a report have to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

NOT_REACHED = "the time for the checks was over"


class OutOfTimeError(Exception):
    """The time for checking is over."""


class Deadline:
    """A time by which the checks have to end, in processor time of this thread.

    So the result does not depend on the load of the machine, but on a busy machine a report takes longer by the clock.

    Args:
        seconds: The time from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; below 0 when the time is over."""
        return self._end - time.thread_time()

    def check(self) -> None:
        """Return if there is time left.

        Raises:
            OutOfTimeError: There is none.
        """
        if self.left_s <= 0:
            raise OutOfTimeError(NOT_REACHED)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While entered, a step that is being traced ends at the next module it calls once the time is over."""
        handles: list[Any] = [
            register_module_forward_pre_hook(lambda *_: self.check()),
            register_optimizer_step_pre_hook(lambda *_: self.check()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
