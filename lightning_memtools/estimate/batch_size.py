"""The largest batch that fits, in few trials."""

from __future__ import annotations

from collections.abc import Callable

_MOST = 2**31


def largest_batch(start: int, *, fits: Callable[[int], bool], peak: Callable[[int], int], limit: int) -> int:
    """Find a batch size that fits while one more does not. 0 where a batch of one does not fit.

    Peaks grow almost linearly, so the line through two of them tells nearly where to look; bisection makes it exact.

    Args:
        start: A size to start from.
        fits: Whether a size fits.
        peak: The peak at a size, to guess from.
        limit: What the peak may be.

    Raises:
        ValueError: Memory does not grow with the batch.
    """
    low, high = 0, _MOST
    other = start * 2 if fits(start) else max(1, start // 2)
    if other == start:
        other = 2
    points = sorted({start, other})
    slope = (peak(points[-1]) - peak(points[0])) / (points[-1] - points[0])
    for size in points:
        low, high = (max(low, size), high) if fits(size) else (low, min(high, size))
    # Each guess is followed by a look at its neighbour; when the line is off, the next starts from what it taught.
    while high - low > 1:
        guess = _guess(low, high, start, peak, slope, limit)
        if guess >= _MOST - 1:
            raise ValueError(
                f"Memory does not grow with the batch: at {points[0]} and {points[-1]} the peaks are {peak(points[0])} and "
                f"{peak(points[-1])} bytes. Check that the first dimension of the batch's tensors is the batch."
            )
        last = (low, high)
        for size in (guess, guess + 1 if fits(guess) else guess - 1):
            if low < size < high:
                low, high = (size, high) if fits(size) else (low, size)
        if high != _MOST and high - low > 1 and (high - low) > (last[1] - last[0]) // 2:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _guess(low: int, high: int, start: int, peak: Callable[[int], int], slope: float, limit: int) -> int:
    known = low or start
    if slope <= 0:
        return min(known * 2, high - 1) if high != _MOST or known < _MOST // 4 else _MOST
    guess = known + int((limit - peak(known)) / slope)
    return min(max(guess, low + 1), high - 1)
