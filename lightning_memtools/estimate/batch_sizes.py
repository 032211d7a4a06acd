"""Makes batches of other sizes without values, and finds the largest batch that fits in few trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch

from lightning_memtools._torch import has_readable_values
from lightning_memtools.memory.allocator import AllocationTrace
from lightning_memtools.memory.nested_tensors import batch_size_in, map_tensors
from lightning_memtools.simulation.known_values import is_too_large

_MOST = 2**31
_NEAREST = 3
_PATIENCE = 8
"""After this many guesses every second trial bisects, so that bad guesses cannot cost more than bisection."""


@dataclass(frozen=True, slots=True)
class TracedSize:
    """The result of tracing a step with one batch size.

    Attributes:
        fits: True if the step fits in memory.
        peak: The peak of allocated memory in bytes.
        trace: The requests to the allocator; None if unknown.
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
    """Find a batch size n that fits although n + 1 does not, by trying sizes; return 0 if no batch fits.

    If the step fails with a batch of one, as BatchNorm does in training, a batch of two is tried instead. If that does
    not fit, the result is 0.

    Tensor sizes are linear in the batch size. So two trials suffice to predict the requests to the allocator at any
    size. Replaying predicted requests is much faster than another trial. The predicted answer and the next larger size
    are tried, too. If the prediction turns out wrong, it is repeated from trials of closer sizes.

    Args:
        start: The batch size of the first trial.
        attempt: Traces the step at a batch size.
        serves: Returns whether the allocator can serve every request of a trace.
        limit: The capacity in bytes.
        known: Results of sizes that were tried before.

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
            note(size, _attempt_or_two(size, attempt, trials))

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
        # A guess that is known to fit is the answer if one more does not fit, so that one is tried.
        attempt_size(max(guess, low + 1))
    return low


def _attempt_or_two(size: int, attempt: Callable[[int], TracedSize], trials: Mapping[int, TracedSize]) -> TracedSize:
    try:
        return attempt(size)
    except ValueError:
        if size != 1:
            raise
    # Without its trace: drawn through the size of one, it would give a wrong line.
    return replace(trials.get(2) or attempt(2), trace=None)


def _guess(
    trials: dict[int, TracedSize], low: int, high: int, serves: Callable[[AllocationTrace], bool], limit: int
) -> int:
    """Return the largest batch size in [low, high) that is predicted to fit, judging by the closest `trials`."""
    nearest = sorted(trials, key=lambda size: abs(size - (low if high == _MOST else (low + high) // 2)))[:_NEAREST]
    for one, other in combinations(nearest, 2):
        first, second = sorted((one, other))
        line = _line(first, trials[first].trace, second, trials[second].trace)
        if line is not None:
            return _last_that(serves, line, low, high)
    return _where_peaks_meet(trials, low, high, limit)


def _line(
    first: int, trace: AllocationTrace | None, second: int, other: AllocationTrace | None
) -> Callable[[int], AllocationTrace] | None:
    """Return a function that extrapolates both traces to a batch size; None if not only the sizes of events differ."""
    if trace is None or other is None or not trace.has_same_events(other):
        return None
    return lambda size: trace.extrapolated(other, Fraction(size - first, second - first))


def _last_that(
    serves: Callable[[AllocationTrace], bool], line: Callable[[int], AllocationTrace], low: int, high: int
) -> int:
    """Find by bisection the largest batch size in [low, high) for which `serves(line(size))` is True."""
    if high == _MOST:
        high = low + 1
        while high < _MOST and serves(line(high)):
            low, high = high, min(_MOST, 4 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if serves(line(middle)) else (low, middle)
    return low


def _where_peaks_meet(trials: dict[int, TracedSize], low: int, high: int, limit: int) -> int:
    """Return the batch size whose peak should reach the limit, by a line through the smallest and largest trials."""
    first, last = min(trials), max(trials)
    rise = trials[last].peak - trials[first].peak
    if high < _MOST:
        guess = last + (limit - trials[last].peak) * (last - first) // rise if rise > 0 else 0
        return guess if low < guess < high else (low + high) // 2
    # Flat so far: the peak of a small batch is the memory of the optimizer.
    return last + (limit - trials[last].peak) * (last - first) // rise if rise > 0 else 16 * max(low, 1)


def resized(batch: Any, size: int) -> Any:
    """Return the batch with the first dimension of its tensors changed to `size`.

    The rows of small CPU tensors are repeated, so that the step can read values such as lengths. All other tensors
    become meta tensors.
    """
    old = batch_size_in(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        shape = (size, *tensor.shape[1:])
        # Dimensions keep their order in memory: a channels_last image stays one.
        order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), -i), reverse=True)
        made = torch.empty(shape, dtype=tensor.dtype, device="meta")
        if order[0] == 0:
            made = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if old and tensor.is_cpu and has_readable_values(tensor) and not is_too_large(made):
            made = torch.empty_like(made, device="cpu").copy_(tensor.detach()[torch.arange(size) % old])
        return made.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, resize)
