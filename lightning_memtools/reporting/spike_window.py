"""A window over recent values, by which spikes are told from noise."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

_UPPER_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Spike:
    """A value, such as a loss, that lies far above the recent values."""

    value: float
    median: float  # of the recent values
    upper: float  # the value that 95% of the recent ones do not exceed
    limit: float  # the value exceeds this
    n_values: int  # the number of recent values

    def __str__(self) -> str:
        return f"{self.value:.4g}, against a median of {self.median:.4g} in the {self.n_values} steps before"


class SpikeWindow:
    """Decides whether each value is a spike, by comparing it with the values before it.

    A value is a spike if it exceeds the median by more than `sensitivity` times the distance from the median to the 95%
    quantile. If all recent values are positive, the distance is taken on a log scale, because losses and gradient norms
    vary by factors, but the limit is capped at 3 * `sensitivity` times the linear distance. With normal noise, a
    `sensitivity` of 4 means 6.6 standard deviations. Spikes join the window as well. Once values at a new, higher level
    make up 5% of the window, they no longer count as spikes.

    Args:
        size: The number of recent values to compare with.
        warm_up: The number of values to collect before the first comparison.
        sensitivity: The factor in the definition above; a larger value gives fewer spikes.
        least_ratio: The least ratio of a spike to a positive median.
    """

    def __init__(
        self, *, size: int = 100, warm_up: int = 50, sensitivity: float = 4.0, least_ratio: float = 1.5
    ) -> None:
        self._warm_up, self._sensitivity, self._least_ratio = warm_up, sensitivity, least_ratio
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def judge(self, value: float) -> Spike | None:
        """Add a value to the window. Return a Spike if the value is a spike, else None. NaN and Inf are ignored."""
        if not math.isfinite(value):
            return None
        spike = self._spike(value) if len(self._sorted) >= self._warm_up else None
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)
        return spike

    def _spike(self, value: float) -> Spike | None:
        n = len(self._sorted)
        median, upper = self._sorted[n // 2], self._sorted[int(_UPPER_SHARE * n)]
        if value <= upper:
            return None
        if median == self._sorted[0] <= 0:
            return None  # such as losses that are 0 but for a few: there is no usual distance to compare with
        distance, least = upper - median, (self._least_ratio - 1) * abs(median)
        if self._sorted[0] > 0:
            power = min(math.log(upper / median) * self._sensitivity, 700.0)
            distance = min(median * math.expm1(power), 3 * self._sensitivity * distance)
        else:
            distance *= self._sensitivity
        limit = median + max(distance, least)
        return Spike(value, median, upper, limit, n) if value > limit else None
