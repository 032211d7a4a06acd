"""The search for the largest batch that fits: two sizes, a line through their peaks, its prediction, then bisection.

It measures nothing itself: `next_size` chooses the next batch size from the measurements of earlier trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_memtools.batch_size.batch_size_result import SizeTrial
from lightning_memtools.batch_size.size_limits import SEGMENT_BYTES, SizeLimits

# The search ends at this share of the largest size that can fit.
_NEAR = 0.95
# The second size goes to this share of what the first one promises: far enough to see the slope, near enough to survive
# a peak that grows faster than the batch.
_SECOND = 0.35
# A jump stays this far below the prediction, for what two measured sizes leave uncertain.
_AIM = 0.99
# No jump goes farther than this many times the size that has run.
_FARTHEST = 128
# Between sizes closer than this, rounding would determine the slope.
_APART = 0.8
# A slope that grows by less than this factor is rounding and no curvature.
_BEND = 1.05


def find_largest(
    run: Callable[[int], SizeTrial], *, start: Sequence[int], limits: SizeLimits, max_trials: int
) -> list[SizeTrial]:
    """Run trials until the largest size that fits is known to within 5%; return all trials, in order.

    Args:
        run: Runs a trial of a batch size. If the data has too few samples, it may run and report a smaller size.
        start: The sizes to run first. A size is skipped if earlier trials already show whether it fits.
        limits: The allowed sizes. A trial may narrow them, once it knows the number of samples.
        max_trials: The maximum number of trials.
    """
    trials: list[SizeTrial] = []
    waiting = list(start)
    while len(trials) < max_trials:
        if waiting:
            first = max(limits.round_down(waiting.pop(0)), limits.smallest())
            if not any(trial.size >= first if trial.fits else trial.size <= first for trial in trials):
                trials.append(run(first))
            continue
        size = next_size(trials, limits, left=max_trials - len(trials))
        if size is None:
            break
        trials.append(run(size))
    return trials


def largest_that_fits(trials: Sequence[SizeTrial]) -> SizeTrial | None:
    """Return the trial of the largest size that fits; None if none does."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: trial.size, default=None)


def next_size(trials: Sequence[SizeTrial], limits: SizeLimits, *, left: int) -> int | None:
    """Return the size to run next, or None if the search is over. `left` is the number of trials that may still run."""
    largest = largest_that_fits(trials)
    lower = 0 if largest is None else largest.size
    upper = min((trial.size for trial in trials if not trial.fits and trial.size > lower), default=math.inf)
    ceiling = limits.round_down(upper - 1)  # infinity less one is infinity
    if ceiling <= lower or lower >= _NEAR * ceiling or (largest is not None and largest.is_within_margin):
        return None
    if lower == 0 and left == 1:
        return limits.smallest()
    predicted = _predict(trials)
    if lower >= _NEAR * predicted and largest is not None and _is_precise(largest):
        return None
    size = limits.round_down(min(_aim(trials, lower, upper, predicted, ceiling), ceiling))
    if size <= lower:  # between admitted sizes
        size = next(size for step in range(1, 2**62) if (size := limits.round_down(lower + step)) > lower)
    return size


def _aim(trials: Sequence[SizeTrial], lower: int, upper: float, predicted: float, ceiling: int) -> float:
    """Return the next size to try, not rounded: near `predicted`, or between `lower` (fits) and `upper` (fails)."""
    aim = _AIM * predicted
    if lower > 0 and sum(not trial.failure for trial in trials) == 1 and ceiling > _NEAR * predicted:
        aim = max(_SECOND * predicted, 2 * lower)
    if upper == math.inf:
        if trials[-1].peak is None:
            return 2 * lower
        if lower >= _NEAR * predicted:  # which is too coarse to end the search
            return 1.1 * lower
        return min(aim, _FARTHEST * lower if trials[-1].limit else math.inf)
    if (trials[-1].fits or lower == 0) and lower < aim < upper:
        return aim
    is_first_failure = len(trials) > 1 and trials[-2].fits and not trials[-1].fits
    if is_first_failure and predicted <= upper / _NEAR:
        return _NEAR * upper  # a single step back from a prediction that was nearly right
    return math.sqrt(max(lower, 1) * upper)


def _is_precise(trial: SizeTrial) -> bool:
    """Return True if one allocator segment is at most 5% of the memory for batches, so that peaks are precise."""
    room = math.inf if trial.limit is None else trial.limit - (trial.base_allocated or 0)
    return (1 - _NEAR) * room >= SEGMENT_BYTES


def _predict(trials: Sequence[SizeTrial]) -> float:
    """Predict the batch size at which the memory limit is reached; infinity if memory did not grow in the trials.

    The prediction extends a line through the peaks of two trials. After a single trial, the line starts at the memory
    without a batch. If memory grew faster than linearly between trials, a curve is extended instead.
    """
    last = max((trial for trial in trials if not trial.failure), key=lambda trial: trial.size, default=None)
    if last is None or last.limit is None or last.batch_allocated is None:
        return math.inf
    size, held, slack, growth = 0, min(last.base_allocated or 0, last.batch_allocated), _slack(last), 0.0
    before = [trial for trial in trials if not trial.failure and trial.size <= _APART * last.size]
    if before:
        earlier = max(before, key=lambda trial: trial.size)
        first_slope = max((earlier.batch_allocated or 0) - held, 0) / earlier.size
        size, held, slack = earlier.size, earlier.batch_allocated or 0, _slack(earlier)
        slope = (last.batch_allocated - held) / (last.size - size)
        growth = (slope - first_slope) / last.size if slope > _BEND * first_slope else 0.0
    # Memory that is reserved but not allocated is expected to go on growing where it grew, and never to shrink.
    grown = max(last.batch_allocated - held, 0) + max(_slack(last) - slack, 0)
    slope = grown / (last.size - size) + growth * (last.size - size)
    room = last.limit - last.batch_allocated - _slack(last)
    root = slope + math.sqrt(max(slope**2 + 4 * growth * room, 0))
    return last.size + 2 * room / root if root else math.inf


def _slack(trial: SizeTrial) -> int:
    """Return the difference in bytes between the peak of reserved memory and the peak of allocated memory."""
    return (trial.peak or 0) - (trial.peak_allocated or 0)
