"""From measured peaks to the size that will just fit: peak = a + b*batch, with a quadratic term where it bends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_memtools.batch_size.trials import Reading

Point = tuple[int, Reading]
"""A batch size, and what a rank showed while running it to the end."""

# A slope that grows by less than this over the measured range is taken for rounding and not for curvature.
_BEND = 1.1
_APART = 0.8


def largest_under_limit(points: Sequence[Point]) -> float:
    """The size at which a rank's peak will reach its limit, as a real number.

    Infinite where there is no limit, or where the peak does not grow.

    Args:
        points: Sizes that ran to the end, over the limit or not; at least one.
    """
    points = _spread(points)
    limit = points[-1][1].limit
    if limit is None or any(reading.batch_allocated is None for _, reading in points):
        return math.inf
    low, high = 0.0, 2.0 * points[-1][0]
    while expected_peak(points, high) <= limit:
        low, high = high, 2 * high
        if high > 2.0**40:
            return math.inf
    while high - low > 1e-3:  # noqa: PLR2004, a small part of one sample
        middle = (low + high) / 2
        low, high = (middle, high) if expected_peak(points, middle) <= limit else (low, middle)
    return low


def _spread(points: Sequence[Point]) -> list[Point]:
    """In order of size, the largest and those well below it: between neighbours rounding would make the slope."""
    chosen: list[Point] = []
    for point in sorted(points, key=lambda point: point[0], reverse=True):
        if not chosen or point[0] <= _APART * chosen[-1][0]:
            chosen.append(point)
    return chosen[::-1]


def expected_peak(points: Sequence[Point], size: float) -> float:
    """What a rank is expected to take of its device at a size, in bytes. `points` in the order of sizes."""
    last_size, last = points[-1]
    allocated = _polynomial(_known(points), size)
    # What the optimizer's own peak is above the batch's does not depend on the batch.
    allocated = max(allocated, *(_optimizer_peak(reading) for _, reading in points))
    # Reserved and not allocated, and all that is outside of the allocator. Where it grew from one size to the next it
    # goes on growing in proportion to the batch; it never shrinks.
    slack = _slack(last)
    if len(points) > 1:
        before_size, before = points[-2]
        slope = (slack - _slack(before)) / (last_size - before_size)
        slack += max(0.0, slope) * max(0.0, size - last_size)
    return allocated + slack


def _slack(reading: Reading) -> float:
    """What is taken and not allocated."""
    return float((reading.peak or 0) - (reading.peak_allocated or 0))


def _optimizer_peak(reading: Reading) -> int:
    peak, batch = reading.peak_allocated or 0, reading.batch_allocated or 0
    return peak if peak > batch else 0


def _known(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Sizes and allocated peaks that the curve goes through, three at the most: the largest, and what is there at 0."""
    known = [(float(size), float(reading.batch_allocated or 0)) for size, reading in points][-3:]
    base = points[0][1].base_allocated
    if len(known) < 3 and base is not None:  # noqa: PLR2004
        known.insert(0, (0.0, min(float(base), known[0][1])))
    return known


def _polynomial(known: Sequence[tuple[float, float]], size: float) -> float:
    """Through the last two points; through three (Newton's form) where the slope grows.

    Where the slope shrinks, something else changed between two sizes, such as what is recomputed, and the last two tell
    nothing of what comes: then through the first and the last.
    """
    (x1, y1), (x2, y2) = known[-2:] if len(known) > 1 else ((0.0, 0.0), known[0])
    slope = max((y2 - y1) / (x2 - x1), 0.0)
    value = y2 + slope * (size - x2)
    if len(known) > 2:  # noqa: PLR2004
        x0, y0 = known[-3]
        before = (y1 - y0) / (x1 - x0)
        if before > 0 and slope > _BEND * before:
            value += (slope - before) / (x2 - x0) * (size - x2) * (size - x1)
        elif slope * _BEND < before:
            value = y2 + (y2 - y0) / (x2 - x0) * (size - x2)
    return value
