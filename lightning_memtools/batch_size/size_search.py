"""The search for the largest batch that fits: a few trials instead of doubling until something breaks.

Nothing is run here: `next_size` decides which size comes next, from what the trials before it have measured. After
two sizes, peak = a + b*batch predicts the largest one that fits; with three, a quadratic term is added where the slope
grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_memtools.batch_size.batch_size_result import RankReading, SizeTrial

RoundDown = Callable[[float], int]
"""Return the largest admitted size at or below a number; 0 where there is none."""

Point = tuple[int, RankReading]
"""A batch size that ran to its end, and what one rank measured."""

# The second size goes to this share of what the first one promises: far enough to see the slope, near enough to survive
# a peak that grows faster than the batch.
_SECOND = 0.35
# The first jump stays this far below the prediction, for what two measured sizes leave uncertain.
_AIM = 0.992
# The last trial should rather fit than come near.
_LAST_AIM = 0.95
# A prediction that is this many times a size that failed is wrong, and not just imprecise.
_OFF = 1.2
# No jump goes farther than this many times what has run: a few samples do not show a term that grows with the square.
_FARTHEST = 1000
# The same while the batch has taken less than what a tensor's segment is rounded up to.
_FARTHEST_FROM_LITTLE = 128
_LITTLE = 2 * 2**20
# Segments of CUDA's caching allocator have 20 MiB (kLargeBuffer in c10/core/AllocatorConfig.h).
_SEGMENT = 20 * 2**20
# Steps beyond a prediction that is too coarse to end the search begin with the search's precision, and each of the next
# is twice as long. Sizes that are nearer to each other than this share are such steps.
_NEAR = 0.2
# Below this size the steps stay at one sample.
_FEW = 8
# A slope that grows by less than this factor over the measured range is rounding and no curvature.
_BEND = 1.05
# Between sizes closer than this, rounding would determine the slope.
_APART = 0.8


def find_largest(
    run: Callable[[int], SizeTrial],
    *,
    start: Sequence[int],
    round_down: RoundDown,
    smallest: Callable[[], int],
    max_trials: int,
    precision: float,
    goes_on: Callable[[Sequence[SizeTrial]], bool] = lambda _: True,
) -> list[SizeTrial]:
    """Run trials until the largest size that fits is known well enough; returns all of them, in order.

    Args:
        run: Runs a size. It may run and report a smaller one, where the data turn out to have fewer samples.
        start: The first sizes, rounded to admitted ones. One that trials have already decided is left out.
        round_down: Rounds to admitted sizes. It is called anew before each trial, since a trial may reveal limits.
        smallest: Returns the smallest admitted size.
        max_trials: The most trials to run.
        precision: The search ends when the largest size that fits is nearer than this share to the prediction, or to
            the smallest size that does not fit.
        goes_on: Is asked before each trial but the first. False ends the search.
    """
    trials: list[SizeTrial] = []
    waiting = list(start)
    while len(trials) < max_trials and (not trials or goes_on(trials)):
        size = max(round_down(waiting.pop(0)), smallest()) if waiting else None
        if size is not None and _is_decided(size, trials):
            continue
        if size is None:
            left = max_trials - len(trials)
            size = next_size(trials, round_down=round_down, smallest=smallest(), left=left, precision=precision)
        if size is None:
            break
        trials.append(run(size))
    return trials


def _is_decided(size: int, trials: Sequence[SizeTrial]) -> bool:
    return any(trial.size >= size if trial.fits else trial.size <= size for trial in trials)


def largest_that_fits(trials: Sequence[SizeTrial]) -> SizeTrial | None:
    """Return the trial of the largest size that fits; None if none does."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: trial.size, default=None)


def next_size(  # noqa: PLR0911, one return for each way on
    trials: Sequence[SizeTrial], *, round_down: RoundDown, smallest: int, left: int, precision: float
) -> int | None:
    """Return the size to run next; None when the search is over."""
    found = largest_that_fits(trials)
    lower = 0 if found is None else found.size
    upper = min((trial.size for trial in trials if not trial.fits and trial.size > lower), default=math.inf)
    ceiling = round_down(upper - 1)  # infinity less one is infinity
    enough = 1 - precision
    if ceiling <= lower or lower >= enough * ceiling or (found is not None and found.is_within_margin):
        return None
    if lower == 0 and left == 1:
        return smallest
    ended = [trial for trial in trials if not any(reading.failure for reading in trial.readings)]
    predicted = _predict_largest(ended)
    if predicted is None:  # the device reports no peaks, or no size has run to its end yet
        return _by_halves(lower, upper, round_down, smallest)
    if len(ended) == 1 and lower and upper == math.inf and predicted != math.inf:
        return _second_size(ended[0], predicted, ceiling, round_down, enough)
    is_precise = _is_precise(ended[-1], precision)
    is_reached = lower >= round_down(predicted) or lower >= enough * predicted
    if is_reached and is_precise:
        return None
    if not is_precise and (is_reached or (upper != math.inf and trials[-1].fits)):
        # The prediction is too coarse to end the search: go on until a size fails, then halve the interval.
        return _beyond_the_prediction(trials, lower, upper, round_down, precision)
    size = _jump(
        trials,
        ended,
        predicted,
        lower=lower,
        upper=upper,
        round_down=round_down,
        smallest=smallest,
        left=left,
        precision=precision,
    )
    if size <= lower or size in {trial.size for trial in trials}:
        size = _by_halves(lower, upper, round_down, smallest) or 0
    return size if lower < size <= ceiling else None


def _second_size(first: SizeTrial, predicted: float, ceiling: int, round_down: RoundDown, enough: float) -> int:
    """Return the second size: only part of the way to the prediction, because one size says little about the slope."""
    far = round_down(predicted) if ceiling <= enough * predicted else round_down(_SECOND * predicted)
    took_little = any((r.batch_allocated or 0) - (r.base_allocated or 0) < _LITTLE for r in first.readings)
    far = min(far, round_down((_FARTHEST_FROM_LITTLE if took_little else _FARTHEST) * first.size))
    return min(ceiling, max(far, round_down(2 * first.size), round_down(first.size + 1)))


def _jump(
    trials: Sequence[SizeTrial],
    ended: Sequence[SizeTrial],
    predicted: float,
    *,
    lower: int,
    upper: float,
    round_down: RoundDown,
    smallest: int,
    left: int,
    precision: float,
) -> int:
    """Return the predicted size, below all sizes that have failed."""
    ceiling = round_down(upper - 1)
    has_limit = any(reading.limit is not None for reading in ended[-1].readings)
    if upper == math.inf and (predicted != math.inf or has_limit):
        predicted = min(predicted, _FARTHEST * lower)  # without growth so far, the prediction is infinite
    aim = predicted if len(ended) > 2 else _AIM * predicted  # noqa: PLR2004, three points determine a parabola
    if left == 1:
        aim = min(aim, _LAST_AIM * predicted)
    size = min(ceiling, max(round_down(aim), smallest))
    n_failures = sum(not trial.fits for trial in trials)
    if n_failures and (size == ceiling or (n_failures > 1 and not trials[-1].fits)):
        # A size that failed says little more than that it is too large. Near the prediction, step back a little, once.
        # Then go to the middle between what fits and what does not, on a scale of ratios, and predict anew from there.
        near = n_failures == 1 and predicted <= _OFF * upper
        back = round_down(upper * (1 - precision) if near else math.sqrt(max(lower, 1) * upper))
        size = back if back > lower else ceiling
    return size


def _is_precise(trial: SizeTrial, precision: float) -> bool:
    """Return True if a segment of the allocator is small beside the memory that a batch may take."""
    for reading in trial.readings:
        available = (reading.limit or 0) - (reading.base_allocated or 0)
        if reading.limit is not None and available * precision < _SEGMENT:
            return False
    return True


def _beyond_the_prediction(
    trials: Sequence[SizeTrial], lower: int, upper: float, round_down: RoundDown, precision: float
) -> int | None:
    """Return a size above one that fits: in doubling steps until a size fails, then halfway to that one."""
    if upper == math.inf:
        below = max((trial.size for trial in trials if trial.fits and trial.size < lower), default=0)
        last = lower - below
        step = 2 * last if last <= _NEAR * lower and lower >= _FEW else precision * lower
    else:
        step = (upper - lower) / 2
    size, ceiling = lower + max(int(step), 1), round_down(upper - 1)
    while size < ceiling and round_down(size) <= lower:
        size += 1
    return min(round_down(size), ceiling)


def _by_halves(lower: int, upper: float, round_down: RoundDown, smallest: int) -> int | None:
    """Return the next size without a prediction: double until a size fails, then bisect."""
    if upper == math.inf:
        size = max(round_down(2 * lower), round_down(lower + 1))
    else:
        size = round_down((lower + upper) / 2)
        if size <= lower:
            size = round_down(upper - 1)
    size = max(size, smallest)
    return size if lower < size < upper else None


def _predict_largest(ended: Sequence[SizeTrial]) -> float | None:
    """Return the smallest of the ranks' predictions; None where no trial has measured a peak."""
    if not ended:
        return None
    ranks: list[list[Point]] = []
    for rank in range(len(ended[0].readings)):
        by_size: dict[int, RankReading] = {trial.size: trial.readings[rank] for trial in ended}
        ranks.append(sorted(by_size.items(), key=lambda point: point[0]))
    if any(reading.batch_allocated is None for points in ranks for _, reading in points):
        return None
    return min(largest_under_limit(points) for points in ranks)


def largest_under_limit(points: Sequence[Point]) -> float:
    """Return the size at which a rank's peak reaches its limit, as a real number.

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


def expected_peak(points: Sequence[Point], size: float) -> float:
    """Return the bytes that a rank is expected to reserve at a size. `points` are in ascending order of sizes."""
    last_size, last = points[-1]
    allocated = _polynomial(_known_peaks(points), size)
    # The memory by which the optimizer's own peak exceeds the batch's does not depend on the batch.
    allocated = max(allocated, *(_optimizer_peak(reading) for _, reading in points))
    # Slack is reserved but not allocated. Where it grew from one size to the next it is
    # expected to go on growing in proportion to the batch; it is never expected to shrink.
    slack = _slack(last)
    if len(points) > 1:
        before_size, before = points[-2]
        slope = (slack - _slack(before)) / (last_size - before_size)
        slack += max(0.0, slope) * max(0.0, size - last_size)
    return allocated + slack


def _spread(points: Sequence[Point]) -> list[Point]:
    """Return the largest size and those well below it, in ascending order."""
    chosen: list[Point] = []
    for point in sorted(points, key=lambda point: point[0], reverse=True):
        if not chosen or point[0] <= _APART * chosen[-1][0]:
            chosen.append(point)
    return chosen[::-1]


def _slack(reading: RankReading) -> float:
    return float((reading.peak or 0) - (reading.peak_allocated or 0))


def _optimizer_peak(reading: RankReading) -> int:
    peak, batch = reading.peak_allocated or 0, reading.batch_allocated or 0
    return peak if peak > batch else 0


def _known_peaks(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return up to three sizes with their allocated peaks: the largest ones, and what is allocated at size 0."""
    known = [(float(size), float(reading.batch_allocated or 0)) for size, reading in points][-3:]
    base = points[0][1].base_allocated
    if len(known) < 3 and base is not None:  # noqa: PLR2004
        known.insert(0, (0.0, min(float(base), known[0][1])))
    return known


def _polynomial(known: Sequence[tuple[float, float]], size: float) -> float:
    """Evaluate the line through the last two points; where the slope grows, the parabola through three (Newton's form).

    Where the slope shrinks, something else changed between two sizes, such as the layers that are recomputed, and the
    last two points do not tell how it goes on: then the line goes through the first and the last.
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
