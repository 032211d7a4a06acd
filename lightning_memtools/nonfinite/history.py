"""The losses and gradient norms of the last steps, and whether they grew."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LENGTH = 20


@dataclass(frozen=True, slots=True)
class Past:
    """A step as the history keeps it.

    Attributes:
        step: The training step.
        loss: The mean of the step's losses on this rank; NaN where there was none.
        norm: The L2 norm of all gradients, before clipping.
    """

    step: int
    loss: float
    norm: float


class History(deque[Past]):
    """The last 20 steps, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=LENGTH)

    def losses(self) -> list[float]:
        """Their losses."""
        return [past.loss for past in self]

    def norms(self) -> list[float]:
        """Their gradient norms."""
        return [past.norm for past in self]


def growth(values: Sequence[float]) -> float | None:
    """How many times larger the last finite value is than the median of the first half; None for fewer than two."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if len(finite) < 2:  # noqa: PLR2004, growth is between two values
        return None
    start = median(finite[: len(finite) // 2])
    return finite[-1] / start if start > 0 else None
