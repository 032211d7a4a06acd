"""The largest batch that fits, in few trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any

import torch

from lightning_memtools.memory.allocator import AllocationTrace
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.simulation.step import batch_size_of

_MOST = 2**31
_NEAREST = 3
_PATIENCE = 8
"""After so many guesses every second trial is in the middle, so that a bad guess cannot cost more than bisection."""


@dataclass(frozen=True, slots=True)
class TracedSize:
    """What is known of a batch size that was tried.

    Attributes:
        fits: Whether it fits.
        peak: The peak of allocated memory in bytes.
        trace: What was asked of the allocator; None where that is not known.
    """

    fits: bool
    peak: int
    trace: AllocationTrace | None = None


def largest_batch(
    start: int,
    *,
    attempt: Callable[[int], TracedSize],
    serves: Callable[[AllocationTrace], bool],
    limit: int,
    known: Mapping[int, TracedSize] | None = None,
) -> int:
    """Find a batch size that fits while one more does not, both tried. 0 where a batch of one does not fit.

    Sizes of tensors are straight lines over the batch size, so two trials tell what the program asks of the allocator
    at any other; replaying that is much quicker than a trial. Mostly two trials for the line and two for the answer are
    enough. Where the program does other things at other sizes, lines are drawn anew through nearer trials.

    Args:
        start: A size to start from.
        attempt: Tries a size.
        serves: Whether what a trace asks for finds memory.
        limit: The capacity in bytes.
        known: Sizes that were tried before.

    Raises:
        ValueError: Memory does not grow with the batch.
    """
    low, high = 0, _MOST
    trials: dict[int, TracedSize] = {}

    def note(size: int, trial: TracedSize) -> None:
        nonlocal low, high
        trials[size] = trial
        low, high = (size, high) if trial.fits else (low, size)

    def attempt_size(size: int) -> None:
        if low < size < high:
            note(size, attempt(size))

    for size, trial in (known or {}).items():
        note(size, trial)
    attempt_size(start)
    if len(trials) < 2:  # noqa: PLR2004, a line needs two
        attempt_size(2 * start if low else max(1, start // 2))
    while high - low > 1:
        n_trials = len(trials)
        if n_trials > _PATIENCE and n_trials % 2 and high < _MOST:
            guess = (low + high) // 2
        else:
            guess = _guess(trials, low, high, serves, limit)
        if guess >= _MOST - 1:
            smallest = min(trials)
            raise ValueError(
                f"Memory does not grow with the batch: at {smallest} and {low} the peaks are {trials[smallest].peak} "
                f"and {trials[low].peak} bytes. Check that the first dimension of the batch's tensors is the batch."
            )
        # A guess that is known to fit already is to be shown the largest.
        attempt_size(max(guess, low + 1))
    return low


def _guess(
    trials: dict[int, TracedSize], low: int, high: int, serves: Callable[[AllocationTrace], bool], limit: int
) -> int:
    """The largest size from low on, and below high, that fits by all that is known."""
    nearest = sorted(trials, key=lambda size: abs(size - (low if high == _MOST else (low + high) // 2)))[:_NEAREST]
    for one, other in combinations(nearest, 2):
        first, second = sorted((one, other))
        line = _line(first, trials[first].trace, second, trials[second].trace)
        if line is not None:
            return _last_that(partial(_holds, serves, line), low, high)
    return _where_peaks_meet(trials, low, high, limit)


def _line(
    first: int, trace: AllocationTrace | None, second: int, other: AllocationTrace | None
) -> Callable[[int], AllocationTrace] | None:
    """The traces of all sizes by those of two; None where these differ in more than sizes."""
    if trace is None or other is None or not trace.has_same_events(other):
        return None
    return lambda size: trace.extrapolated(other, Fraction(size - first, second - first))


def _holds(serves: Callable[[AllocationTrace], bool], line: Callable[[int], AllocationTrace], size: int) -> bool:
    return serves(line(size))


def _last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number from low on, which is known to hold, and below high, which is not."""
    if high == _MOST:
        high = low + 1
        while high < _MOST and holds(high):
            low, high = high, min(_MOST, 4 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _where_peaks_meet(trials: dict[int, TracedSize], low: int, high: int, limit: int) -> int:
    """Where the line through the outermost peaks meets the limit; the middle where that is no help."""
    first, last = min(trials), max(trials)
    rise = trials[last].peak - trials[first].peak
    if high < _MOST:
        guess = last + (limit - trials[last].peak) * (last - first) // rise if rise > 0 else 0
        return guess if low < guess < high else (low + high) // 2
    # Flat so far: a small batch hides behind what the optimizer takes.
    return last + (limit - trials[last].peak) * (last - first) // rise if rise > 0 else 16 * max(low, 1)


def resized(batch: Any, size: int) -> Any:
    """Meta tensors of the batch's shapes with another first dimension, where that is the batch's size."""
    old = batch_size_of(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        # As many elements in the same order of dimensions: a channels_last image stays one.
        order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), -i), reverse=True)
        if order[0] != 0:
            shape = (size, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        return torch.empty_strided(
            (size, *tensor.shape[1:]),
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )

    return map_tensors(batch, resize)


def first_rows(batch: Any, size: int) -> Any:
    """The first samples of a batch, values kept."""
    old = batch_size_of(batch)
    return map_tensors(
        batch, lambda tensor: tensor[:size].clone() if tensor.dim() and tensor.shape[0] == old else tensor
    )
