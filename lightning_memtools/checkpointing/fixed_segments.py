"""Cuts each chain into a fixed number of chunks, where the peak is lowest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_memtools.checkpointing.memory_model import Range, Ranges, Unit, estimate
from lightning_memtools.checkpointing.optimal_ranges import thinned

INFINITE = float("inf")
# Every place in a chain up to this long may be a cut; of a longer one half as many are, or it would take minutes.
_MOST_PLACES = 128


def cut(units: Sequence[Unit], segments: int) -> Ranges:
    """Return at most `segments` chunks of each chain, all but the last recomputed, with the lowest peak of the model.

    As in `torch.utils.checkpoint.checkpoint_sequential`, the last chunk runs as usual: it would be recomputed at once.
    Layers that may not be recomputed run between the ranges of their chunk.
    """
    stretches = [_Stretch(units, start, stop) for start, stop in _stretches(units)]
    low, high = 0, max(estimate(units, ()).peak_bytes, 1)
    best = _fit(stretches, segments, high) or ()
    while low < high:  # bisect for the lowest limit that some cut fits
        middle = (low + high) // 2
        found = _fit(stretches, segments, middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


class _Stretch:
    """A chain's units, or those between two chains, with the bytes that each chunk keeps and its peak."""

    def __init__(self, units: Sequence[Unit], start: int, stop: int) -> None:
        self.is_chain = units[start].chain is not None
        places = [*range(start, stop + 1)]
        if self.is_chain and stop - start > _MOST_PLACES:
            places = [*thinned(units, places, _MOST_PLACES // 2)]
        n = len(places) - 1
        self.ranges: dict[tuple[int, int], Ranges] = {}
        self.kept = np.full((n, n + 1), INFINITE)
        self.peak = np.full((n, n + 1), INFINITE)
        for first in range(n if self.is_chain else 0):
            for last in range(first + 1, n + 1):
                found = self.ranges[first, last] = tuple(_ranges(units, places[first], places[last]))
                one = estimate(units, found, places[first], places[last], input_held=places[first] == 0)
                self.kept[first, last] = one.kept_bytes
                self.peak[first, last] = one.peak_bytes
        last_chunks = places[:-1] if self.is_chain else places[:1]
        plain = [estimate(units, (), first, stop, input_held=first == 0) for first in last_chunks]
        self.last_kept = np.array([one.kept_bytes for one in plain], dtype=float)
        self.last_peak = np.array([one.peak_bytes for one in plain], dtype=float)

    def fit(self, held: float, segments: int, limit: int) -> tuple[float, Ranges] | None:
        """Return the chunks that keep least within the limit, and what is held after them; `held` is before them."""
        n = len(self.kept)
        if not self.is_chain:
            return None if held + self.last_peak[0] > limit else (held + self.last_kept[0], ())
        reached = np.full(n, INFINITE)
        reached[0] = held
        history = [reached]
        cuts: list[np.ndarray] = []
        for _ in range(min(segments, n) - 1):
            allowed = np.where(reached[:, None] + self.peak <= limit, reached[:, None] + self.kept, INFINITE)[:, :n]
            cuts.append(allowed.argmin(axis=0))
            reached = np.minimum(allowed.min(axis=0), INFINITE)
            history.append(reached)
        best: tuple[float, int, int] | None = None
        for count, kept in enumerate(history):
            ends = np.where(kept + self.last_peak <= limit, kept + self.last_kept, INFINITE)
            at = int(ends.argmin())
            if ends[at] < INFINITE and (best is None or ends[at] < best[0]):
                best = (float(ends[at]), count, at)
        if best is None:
            return None
        total, count, at = best
        found: list[Range] = []
        for chosen in reversed(cuts[:count]):
            before = int(chosen[at])
            found[:0] = self.ranges[before, at]
            at = before
        return total, tuple(found)


def _fit(stretches: Sequence[_Stretch], segments: int, limit: int) -> Ranges | None:
    held = 0.0
    found: list[Range] = []
    for stretch in stretches:
        one = stretch.fit(held, segments, limit)
        if one is None:
            return None
        held = one[0]
        found += one[1]
    return tuple(found)


def _stretches(units: Sequence[Unit]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(units) + 1):
        if at == len(units) or units[at].chain != units[start].chain:
            yield start, at
            start = at


def _ranges(units: Sequence[Unit], start: int, stop: int) -> Iterator[Range]:
    """Yield a chunk's ranges: the units between those that must stay outside, from where a range may begin."""
    first = start
    while first < stop:
        if units[first].pinned or not units[first].may_start:
            first += 1
            continue
        last = first
        while last < stop and not units[last].pinned:
            last += 1
        yield Range(first, last)
        first = last
