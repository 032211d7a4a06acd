"""The search for the largest batch that fits: two sizes, a line through their peaks, its prediction, then bisection.

It measures nothing itself: `next_size` chooses the next batch size from the measurements of earlier trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_memtools.batch_size.batch_size_result import RankReading, SizeTrial
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
        run: Runs a trial of a size. If the data have fewer samples, it may run and report a smaller size.
        start: The sizes to run first. A size is skipped if earlier trials show whether it fits.
        limits: The allowed sizes. A trial may narrow them, once it knows the number of samples.
        max_trials: The most trials to run.
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
    """Return the size to try next, not yet rounded: near `predicted`, or between the bounds `lower` and `upper`."""
    aim = _AIM * predicted
    if lower > 0 and sum(trial.ended for trial in trials) == 1 and ceiling > _NEAR * predicted:
        aim = max(_SECOND * predicted, 2 * lower)
    if upper == math.inf:
        readings = trials[-1].readings
        if any(reading.peak is None for reading in readings):
            return 2 * lower
        if lower >= _NEAR * predicted:  # which is too coarse to end the search
            return 1.1 * lower
        return min(aim, _FARTHEST * lower if any(reading.limit for reading in readings) else math.inf)
    if (trials[-1].fits or lower == 0) and lower < aim < upper:
        return aim
    is_first_failure = len(trials) > 1 and trials[-2].fits and not trials[-1].fits
    if is_first_failure and predicted <= upper / _NEAR:
        return _NEAR * upper  # a single step back from a prediction that was nearly right
    return math.sqrt(max(lower, 1) * upper)


def _is_precise(trial: SizeTrial) -> bool:
    """Return True if a segment, the unit in which reserved memory grows, is at most 5% of the memory for batches."""
    rooms = [r.limit - (r.base_allocated or 0) for r in trial.readings if r.limit is not None]
    return all((1 - _NEAR) * room >= SEGMENT_BYTES for room in rooms)


def _predict(trials: Sequence[SizeTrial]) -> float:
    """Predict the smallest size at which any rank reaches its memory limit; infinity if no peak was seen to grow."""
    ended = sorted((trial for trial in trials if trial.ended), key=lambda trial: trial.size)
    if not ended:
        return math.inf
    before = [trial for trial in ended if trial.size <= _APART * ended[-1].size]
    ranks = range(len(ended[-1].readings))
    return min(_reaches_limit(before[-1:], ended[-1], rank) for rank in ranks)


def _reaches_limit(before: Sequence[SizeTrial], last: SizeTrial, rank: int) -> float:
    """Predict the size at which a rank reaches its memory limit, by a line through the last trial and an earlier one.

    Without an earlier trial the line starts at size 0. If the slope has increased since the earlier trial, it is
    expected to keep increasing.
    """
    reading = last.readings[rank]
    if reading.limit is None or reading.batch_allocated is None:
        return math.inf
    size, held, slack, growth = 0, min(reading.base_allocated or 0, reading.batch_allocated), _slack(reading), 0.0
    if before:
        earlier = before[0].readings[rank]
        first_slope = max((earlier.batch_allocated or 0) - held, 0) / before[0].size
        size, held, slack = before[0].size, earlier.batch_allocated or 0, _slack(earlier)
        slope = (reading.batch_allocated - held) / (last.size - size)
        growth = (slope - first_slope) / last.size if slope > _BEND * first_slope else 0.0
    # Memory that is reserved but not allocated is expected to go on growing where it grew, and never to shrink.
    grown = max(reading.batch_allocated - held, 0) + max(_slack(reading) - slack, 0)
    slope = grown / (last.size - size) + growth * (last.size - size)
    room = reading.limit - reading.batch_allocated - _slack(reading)
    root = slope + math.sqrt(max(slope**2 + 4 * growth * room, 0))
    return last.size + 2 * room / root if root else math.inf


def _slack(reading: RankReading) -> int:
    return (reading.peak or 0) - (reading.peak_allocated or 0)
