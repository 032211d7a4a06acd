"""The search: a few trials instead of doubling until something breaks. Pure: it only decides which size is run next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_memtools.batch_size.fit import Point, largest_under_limit
from lightning_memtools.batch_size.trials import Reading, Trial

RoundDown = Callable[[float], int]
"""The largest admitted size at or below a number; 0 where there is none."""

# How far the second size goes of what the first one promises: far enough to see the slope, near enough to survive a
# peak that grows faster than the batch.
_SECOND = 0.35
# How far below the prediction the first jump aims: what two measured sizes leave uncertain.
_AIM = 0.992
# The last trial has to fit, rather than to come near.
_LAST_AIM = 0.95
# No more trials once what was run is this share of what is predicted, or of what is known to be too much.
_ENOUGH = 0.976
_CLOSE = 0.975
# A prediction this many times over what failed is wrong, and not only imprecise.
_OFF = 1.2
# No jump goes farther than this many times what has run: a few samples do not show a term that grows with the square.
_FARTHEST = 1000
# And no farther than this while the batch has taken less than what a tensor's segment is rounded up to.
_FARTHEST_FROM_LITTLE = 128
_LITTLE = 2 * 2**20
# Segments of CUDA's caching allocator have 20 MiB (kLargeBuffer in c10/core/AllocatorConfig.h).
_GRAIN = 20 * 2**20


def find_largest(
    run: Callable[[int], Trial], *, start: int, round_down: RoundDown, smallest: Callable[[], int], max_trials: int
) -> list[Trial]:
    """Run trials until the largest size that fits is found, or is known well enough; all of them, in order.

    Args:
        run: Runs a size. It may run a smaller one, where the data turn out to have no more samples, and says so in the
            trial.
        start: The first size, rounded to an admitted one.
        round_down: Which sizes are admitted. Asked anew before each trial: limits may become known on the way.
        smallest: The smallest admitted size.
        max_trials: The most trials to run.
    """
    trials: list[Trial] = []
    size: int | None = max(round_down(start), smallest())
    while size is not None and len(trials) < max_trials:
        trials.append(run(size))
        size = next_size(trials, round_down=round_down, smallest=smallest(), left=max_trials - len(trials))
    return trials


def best(trials: Sequence[Trial]) -> Trial | None:
    """The largest size that was run and fitted."""
    return max((trial for trial in trials if trial.fits), key=lambda trial: trial.size, default=None)


def next_size(  # noqa: C901, PLR0911, one decision after the other, each with its reason
    trials: Sequence[Trial], *, round_down: RoundDown, smallest: int, left: int
) -> int | None:
    """The size to run next; None when the search is over."""
    found = best(trials)
    lower = 0 if found is None else found.size
    upper = min((trial.size for trial in trials if not trial.fits and trial.size > lower), default=math.inf)
    ceiling = round_down(upper - 1)  # infinity less one is infinity
    if ceiling <= lower or lower >= _CLOSE * ceiling:
        return None
    if lower == 0 and left == 1:
        return smallest
    promised = _predicted(trials)
    if promised is None:  # the device tells no peaks, or no size has run to its end yet
        return _by_halves(lower, upper, round_down, smallest)
    ran = {trial.size for trial in trials}
    if len(_ended(trials)) == 1 and lower and upper == math.inf and promised != math.inf:
        # One size tells next to nothing of the slope.
        far = round_down(promised) if ceiling <= _ENOUGH * promised else round_down(_SECOND * promised)
        far = min(far, round_down((_FARTHEST_FROM_LITTLE if _took_little(trials) else _FARTHEST) * lower))
        return min(ceiling, max(far, round_down(2 * lower), round_down(lower + 1))) if ceiling > lower else None
    settled = lower >= round_down(promised) or lower >= _ENOUGH * promised
    if settled and _is_precise(trials):
        return None
    if settled:  # step by step, until one fails
        return _above(int(lower * 1.02), ceiling, round_down)
    if upper == math.inf and promised != math.inf:
        promised = min(promised, _FARTHEST * lower)
    elif upper == math.inf and any(r.limit is not None for r in _ended(trials)[-1].readings):
        promised = _FARTHEST * lower  # no growth was seen yet
    aim = promised if len(_ended(trials)) > 2 else _AIM * promised  # noqa: PLR2004
    if left == 1:
        aim = min(aim, _LAST_AIM * promised)
    size = min(ceiling, max(round_down(aim), smallest))
    failures = sum(not trial.fits for trial in trials)
    if size == ceiling and upper != math.inf and failures:
        # What ran out of memory at once tells nothing but that it is too much. Near the prediction, step back, further
        # each time; where the prediction was far off, begin anew in the middle (of a scale of ratios).
        near = promised <= _OFF * upper
        back = round_down(upper * (1 - 0.015 * 2**failures) if near else math.sqrt(max(lower, 1) * upper))
        size = back if back > lower else ceiling
    if size <= lower or size in ran:
        size = _by_halves(lower, upper, round_down, smallest) or 0
    return size if lower < size <= ceiling else None


def _is_precise(trials: Sequence[Trial]) -> bool:
    """Whether the grain of the allocator is small beside what the batch may take: else a prediction decides nothing."""
    for reading in _ended(trials)[-1].readings:
        room = (reading.limit or 0) - (reading.base_allocated or 0)
        if reading.limit is not None and room < _GRAIN / (1 - _ENOUGH):
            return False
    return True


def _took_little(trials: Sequence[Trial]) -> bool:
    readings = _ended(trials)[-1].readings
    return any((one.batch_allocated or 0) - (one.base_allocated or 0) < _LITTLE for one in readings)


def _above(lower: int, ceiling: int, round_down: RoundDown) -> int:
    """The next admitted size above one that is, but no more than the ceiling."""
    size = lower + 1
    while size < ceiling and round_down(size) <= lower:
        size += 1
    return min(round_down(size), ceiling)


def _ended(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if not any(reading.failure for reading in trial.readings)]


def _predicted(trials: Sequence[Trial]) -> float | None:
    """The least that any rank predicts of itself; None where nothing was measured."""
    ended = _ended(trials)
    if not ended:
        return None
    n_ranks = len(ended[0].readings)
    ranks: list[list[Point]] = [_distinct(ended, rank) for rank in range(n_ranks)]
    if any(reading.batch_allocated is None for points in ranks for _, reading in points):
        return None
    return min(largest_under_limit(points) for points in ranks)


def _distinct(trials: Sequence[Trial], rank: int) -> list[Point]:
    """One point for each size, in their order."""
    by_size: dict[int, Reading] = {trial.size: trial.readings[rank] for trial in trials}
    return sorted(by_size.items(), key=lambda point: point[0])


def _by_halves(lower: int, upper: float, round_down: RoundDown, smallest: int) -> int | None:
    """Without a prediction: double until it fails, then halve the interval."""
    if upper == math.inf:
        size = max(round_down(2 * lower), round_down(lower + 1))
    else:
        size = round_down((lower + upper) / 2)
        if size <= lower:
            size = round_down(upper - 1)
    size = max(size, smallest)
    return size if lower < size < upper else None
