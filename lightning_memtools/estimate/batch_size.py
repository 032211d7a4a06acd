"""The largest batch that fits, in few trials."""

from __future__ import annotations

from collections.abc import Callable

_MOST = 2**31
_NEAR = 0.01
_LEAP = 16


def largest_batch(start: int, *, fits: Callable[[int], bool], peak: Callable[[int], int], limit: int) -> int:
    """Find a batch size that fits while one more does not. 0 where a batch of one does not fit.

    Memory grows almost linearly with the batch, so the line through two peaks tells nearly where to look; bisection of
    what is left makes it exact.

    Args:
        start: A size to start from.
        fits: Whether a size fits.
        peak: The peak of allocated memory at a size that was tried, to guess from.
        limit: What the peak may be.

    Raises:
        ValueError: Memory does not grow with the batch.
    """
    low, high = 0, _MOST
    tried: list[int] = []

    def try_size(size: int) -> None:
        nonlocal low, high
        if low < size < high:
            tried.append(size)
            low, high = (size, high) if fits(size) else (low, size)

    try_size(start)
    try_size(2 * start if low else start // 2)
    while high == _MOST:
        guess = _on_line(sorted(tried), peak, limit)
        if guess is None:
            # Flat so far: a small batch hides behind what the optimizer takes.
            guess = _LEAP * low
        if guess >= _MOST:
            raise ValueError(
                f"Memory does not grow with the batch: at {tried[0]} and {low} the peaks are {peak(tried[0])} and "
                f"{peak(low)} bytes. Check that the first dimension of the batch's tensors is the batch."
            )
        try_size(max(guess, low + 1))
        # A little more, to have the answer between the two.
        try_size(_further(low))
    guess = _on_line(sorted(tried), peak, limit)
    if guess is not None:
        try_size(guess)
        try_size(_further(low) if low == guess else guess - (_further(guess) - guess))
    while high - low > 1:
        try_size((low + high) // 2)
    return low


def _further(size: int) -> int:
    return size + 1 + int(_NEAR * size)


def _on_line(sizes: list[int], peak: Callable[[int], int], limit: int) -> int | None:
    """Where the line through the smallest and the largest size meets the limit; None where it does not rise."""
    first, last = sizes[0], sizes[-1]
    rise = peak(last) - peak(first)
    if first == last or rise <= 0:
        return None
    return last + (limit - peak(last)) * (last - first) // rise
