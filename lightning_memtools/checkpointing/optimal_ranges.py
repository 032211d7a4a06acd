"""Chooses which units to recompute, by a dynamic program over the units of a step.

The program is that of Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019): the least recomputation of units i to j in m bytes either keeps the tensors of
unit i, or recomputes units i to k from the input of i when the backward pass of the rest is done. Here it also knows
that a kept tensor can be the output of one unit and the input of the next, that running again stops at the last tensor
that was kept, and that some units may not be recomputed. All budgets are solved at once: a state holds a cost per
amount of memory.

Its time grows with the cube of the number of places where a range may begin or end. Where that would take long, ranges
begin and end at some of these places only, and each plan is then solved again with the places around its own.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_memtools.checkpointing.memory_model import (
    ALL,
    NOTHING,
    PART,
    Range,
    Ranges,
    Unit,
    after_keeping,
    boundaries,
    estimate,
    held_after,
    ranges_with_products,
)

Costs = np.ndarray[Any, np.dtype[np.float64]]
Slots = np.ndarray[Any, np.dtype[np.int64]]
INFINITE = float("inf")

MOST_TRANSITIONS = 128**3
"""The most places where ranges may begin and end, to the power of three and added up over all chains: about 1 s."""

_MOST_STATES = 160**2
"""The same to the power of two: the tables take 8 kB for each, in all 200 MB."""

_RESOLUTION = 1000
_MOST_ROUNDS = 6
_LEAST_GAIN = 0.002
# A chain of thousands of layers has tensors that are smaller than a thousandth of it, but must not count as nothing.
_MOST_FINER = 4
_NEAR = 0.05


Row = tuple[int, ...]
"""Places between layers that run one after the other: a range may begin at each and end at each later one."""


class OptimalRanges:
    """All plans of least recomputation, by the memory that they may take.

    Args:
        units: The units of a step, in the order of its forward pass.
        limit_bytes: The largest amount of memory to solve for, usually the peak of the plain step.
        rows: The ranges that there may be, nested in any way; None for those that the units' chains allow.
        resolution: The number of amounts that this is divided into. Sizes are rounded to the nearest. None for a
            thousand, and up to four times as many where that takes no longer than the largest tree does.
        most_transitions: Where solving would take more steps than this, plans are found in a coarse solution first, and
            refined when they are asked for.

    Attributes:
        is_coarse: Whether that is so.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        limit_bytes: int,
        rows: Sequence[Row] | None = None,
        resolution: int | None = None,
        most_transitions: int = MOST_TRANSITIONS,
    ) -> None:
        self._units = list(units)
        self._rows = _flat_rows(units) if rows is None else list(rows)
        self.is_coarse = _is_too_much(self._rows, most_transitions)
        if resolution is None:
            transitions, states = _work_and_states(self._rows)
            finer = min(most_transitions / max(transitions, 1), _MOST_STATES / max(states, 1), _MOST_FINER)
            resolution = int(_RESOLUTION * max(finer, 1))
        # The tensors between units add up: a quantum that divides their most common size rounds nothing there.
        self._quantum = max(limit_bytes / resolution, 1.0)
        often = _most_common([one.n_bytes for one in boundaries(units)], units)
        if often > self._quantum / (_MOST_FINER if self.is_coarse else 1):
            self._quantum = often / max(round(often / self._quantum), 1)
        n = int(limit_bytes / self._quantum) + 1
        self._most_transitions = int(most_transitions / max(n / resolution, 1))
        places = places_of(units, self._rows)
        if self.is_coarse:
            places = coarse_places(units, self._most_transitions // 2, self._rows)
        self._solution = _Solution(self._units, self._rows, places, self._quantum, n)
        self._finer: _Solution | None = None

    def frontier(self) -> list[tuple[int, int]]:
        """Returns peak in bytes and extra operations of every plan that no other one beats, by falling peak.

        Where the solution is coarse, `best` adds to it: there may be better ones around the plan that it returned.
        """
        costs = self._solution.costs.copy()
        if self._finer is not None:
            n = len(self._finer.costs)
            costs[:n] = np.minimum(costs[:n], self._finer.costs)
        points: list[tuple[int, int]] = []
        for slot in range(len(costs) - 1, -1, -1):
            if costs[slot] == INFINITE:
                break
            if points and costs[slot] == points[-1][1]:
                points.pop()
            # Up: `best` of what is returned here must find this slot again, and not the one below.
            points.append((math.ceil(slot * self._quantum), int(costs[slot])))
        return points

    def best(self, limit_bytes: float) -> Ranges | None:
        """Returns the plan of least recomputation whose peak is within the limit; None if there is none."""
        slot = min(int(limit_bytes / self._quantum + 1e-6), len(self._solution.costs) - 1)
        if slot < 0 or self._solution.costs[slot] == INFINITE:
            return None
        if not self.is_coarse:
            return self._solution.plan(slot)
        finer = self._finer
        if finer is None or not (1 - _NEAR) * len(finer.costs) <= slot + 1 <= len(finer.costs):
            finer = self._finer = self._refined(slot)
        return min((finer, self._solution), key=lambda one: float(one.costs[slot])).plan(slot)

    def _refined(self, slot: int) -> _Solution:
        """Returns a solution, up to this amount of memory, with more places around those that its best plan uses."""
        solution = self._solution
        for _ in range(_MOST_ROUNDS):
            used = _ends_of(solution.plan(slot))
            places = _around(used, solution.places, self._units, self._rows, self._most_transitions // 8)
            before = solution.costs[slot]
            if set(places) <= set(solution.places):
                break
            solution = _Solution(self._units, self._rows, places, self._quantum, slot + 1)
            if solution.costs[slot] > (1 - _LEAST_GAIN) * before:
                break
        return solution


def places_of(units: Sequence[Unit], rows: Sequence[Row]) -> list[int]:
    """Returns every place where a range may begin or end, and all places outside of ranges."""
    places = set(range(len(units) + 1))
    for start, stop in _stretches(rows):
        places -= set(range(start + 1, stop))
    return sorted(places.union(*rows))


def coarse_places(units: Sequence[Unit], most_transitions: int, rows: Sequence[Row] | None = None) -> list[int]:
    """Returns places where ranges may begin and end, few enough to be solved: all of them, if these are few."""
    rows = _flat_rows(units) if rows is None else rows
    outermost = [row for row in rows if (row[0], row[-1]) in set(_stretches(rows))]
    if not _is_too_much(rows, most_transitions):
        return places_of(units, rows)
    most = max((len(row) - 1 for row in outermost), default=1)
    while most > 1 and _is_too_much([row[: most + 1] for row in outermost], most_transitions):
        most -= max(1, most // 16)
    places = set(places_of(units, outermost))
    for row in outermost:
        if len(row) - 1 > most:
            places -= set(row[1:-1]) - set(spread_places(units, row[0], row[-1], most, set(row)))
    return sorted(places)


def _is_too_much(rows: Sequence[Row], most_transitions: int) -> bool:
    """Returns whether ranges between these places take too long to solve, or too much memory."""
    transitions, states = _work_and_states(rows)
    return transitions > most_transitions or states > _MOST_STATES


def _work_and_states(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the steps and the states of solving for ranges between these places.

    It counts ranges without listing them: in a chain of thousands of layers there are millions.
    """
    beginning: dict[int, int] = {}  # how many ranges begin at a place
    starts: dict[int, int] = {}
    for row in rows:
        for at, place in enumerate(row):
            beginning[place] = beginning.get(place, 0) + len(row) - 1 - at
            if at:
                starts[place] = min(row[0], starts.get(place, row[0]))
    places = sorted(beginning)
    at_of = {place: at for at, place in enumerate(places)}
    begun = [0, *(int(one) for one in np.cumsum([beginning[place] for place in places]))]
    columns = [(at_of[first], at_of[last]) for last, first in starts.items()]
    states = 2 * sum(last - first for first, last in columns)
    return 3 * sum(begun[last] - begun[first] for first, last in columns), states


def _ends(rows: Iterable[Row]) -> dict[int, list[int]]:
    """Returns for each place where ranges may begin the places where these may end."""
    found: dict[int, set[int]] = {}
    for row in rows:
        for at, first in enumerate(row[:-1]):
            found.setdefault(first, set()).update(row[at + 1 :])
    return {first: sorted(lasts) for first, lasts in found.items()}


def spread_places(units: Sequence[Unit], start: int, stop: int, cells: int, among: set[int] | None = None) -> list[int]:
    """Returns places that divide units into cells of similar weight, at small tensors where there are some.

    With `among`, only these places are taken.
    """
    sizes = [one.n_bytes for one in boundaries(units)]
    kept = [0.0] + [float(unit.own_bytes + unit.out_kept) for unit in units[start:stop]]
    ran = [0.0] + [float(unit.operations) for unit in units[start:stop]]
    weights = np.linspace(0, 1, stop - start + 1)
    for one in (np.cumsum(kept), np.cumsum(ran)):
        weights = weights + one / max(one[-1], 1.0)
    found = []
    ends = [start + int(at) for at in np.searchsorted(weights, np.linspace(0, weights[-1], 2 * cells + 1))]
    for low, middle, high in zip(ends[1::2], ends[2::2], [*ends[3::2], stop], strict=True):
        # From half a cell before to half a cell after.
        near = [at for at in range(max(low, start + 1), min(high, stop - 1) + 1) if among is None or at in among]
        if near:
            found.append(min(near, key=lambda at: (not units[at].may_start, sizes[at], abs(at - middle))))
    return found


def _around(
    used: set[int], known: Sequence[int], units: Sequence[Unit], rows: Sequence[Row], most_transitions: int
) -> list[int]:
    """Returns the places that a plan uses and, as far as there may be so many, those half way to the known ones."""
    every = places_of(units, rows)
    inside = {at for start, stop in _stretches(rows) for at in range(start + 1, stop)}
    always = (set(every) - inside) | used
    halves: list[int] = []
    for place in sorted(used):
        at = bisect_left(known, place)
        below, above = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        here = bisect_left(every, place)
        halves += [
            every[(bisect_left(every, below) + here) // 2],
            every[(here + bisect_left(every, above) + 1) // 2],
        ]
    for step in range(1, len(halves) + 1):
        places = sorted(always.union(halves[::step]))
        if not _is_too_much(_within(rows, places), most_transitions):
            return places
    return sorted(always)


def _within(rows: Sequence[Row], places: Iterable[int]) -> list[Row]:
    """Returns the rows with these places only."""
    taken = set(places)
    found = [tuple(place for place in row if place in taken) for row in rows]
    return [row for row in found if len(row) > 1]


def _ends_of(ranges: Ranges) -> set[int]:
    found: set[int] = set()
    for one in ranges:
        found |= {one.start, one.stop} | _ends_of(one.inner)
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """A cell whose tensors are kept, as far as it does not depend on where the range around it ends.

    Attributes:
        out_held: What is held of its output afterwards.
        added: The memory that it adds.
        before: The memory that is added before each of its units runs.
        running: The bytes that each unit needs to run, above what is held.
        top: The least memory in which its backward pass runs.
        again_top: The same in a range that ran again.
    """

    out_held: int
    added: int
    before: Costs
    running: Costs
    top: int
    again_top: int


@dataclass(frozen=True, slots=True)
class _Selective:
    """A range that keeps products.

    Attributes:
        range: The range.
        last: The index of the place where it ends.
        out_held: What is held of its output afterwards.
        added: The memory that it adds.
        need: The least memory in which it runs, forward and back.
        cost: The operations that it computes again.
    """

    range: Range
    last: int
    out_held: int
    added: int
    need: int
    cost: int


class _Solution:
    """The tables of the dynamic program for ranges that begin and end at certain places.

    Between two neighbouring places lies a cell: units of which either all are in a range or none is.
    """

    def __init__(
        self, units: Sequence[Unit], rows: Sequence[Row], places: Sequence[int], quantum: float, n: int
    ) -> None:
        self.places = places
        self._at = np.asarray(places)
        self._units = units
        self._quantum = quantum
        self._n = n
        self._between = boundaries(units)
        # In numbers that a float holds exactly.
        self._operations = np.array([0, *np.cumsum([unit.operations for unit in units])], dtype=np.float64)
        self._dropping = np.array([one.n_bytes for one in self._between[:-1]], dtype=np.float64) + [
            unit.dropping_bytes for unit in units
        ]
        self._alongside = np.array(
            [(at, maker, size) for at, unit in enumerate(units) for maker, size in unit.alongside], dtype=np.int64
        ).reshape(-1, 3)
        self._running: dict[int, Costs] = {}
        self._running_slots: dict[tuple[int, int], Slots] = {}
        self._kept_inside: dict[tuple[int, int, int, int], tuple[int, int, float, int]] = {}
        self._forward_base = np.array([unit.forward_base for unit in units], dtype=np.float64)
        self._forward_bytes = np.array([unit.forward_bytes for unit in units], dtype=np.float64)
        self._again_bytes = np.array([unit.again_bytes for unit in units], dtype=np.float64)
        # The last unit before each place that keeps anything.
        saving = [at if unit.saves else -1 for at, unit in enumerate(units)]
        self._saving_before = [-1, *(int(at) for at in np.maximum.accumulate(saving))] if saving else [-1]
        self._same_until = _same_until(units)
        self._cells = {
            (cell, held): self._cell(cell, held) for cell in range(len(places) - 1) for held in (NOTHING, PART, ALL)
        }
        at_of = {place: at for at, place in enumerate(places)}
        # The places where ranges from a place may end, and the costs of each in a range that runs again: its forward
        # pass, and running again itself.
        self._ends = {
            at_of[first]: np.array([at_of[last] for last in lasts])
            for first, lasts in _ends(_within(rows, places)).items()
            if units[first].may_start
        }
        self._listed_ends = {first: ends.tolist() for first, ends in self._ends.items()}
        self._same_ends = {first: self._n_same(first, ends) for first, ends in self._ends.items()}
        self._again = {first: np.empty((len(ends), n)) for first, ends in self._ends.items()}
        # The first slot of each where its costs are finite, and the first from where on they stay the same.
        self._again_spans = {first: np.empty((2, len(ends)), dtype=np.int64) for first, ends in self._ends.items()}
        # For each place where a range may end, its least start, its table: [held, first - start], and the spans in it.
        self._columns: dict[int, tuple[int, Costs, Slots]] = {}
        self._scratch = np.empty((max(map(len, self._ends.values()), default=0), n))
        starts: dict[int, int] = {}
        for first, ends in self._ends.items():
            for last in ends:
                starts[int(last)] = min(first, starts.get(int(last), first))
        for last in sorted(starts):
            self._solve_inner(starts[last], last)
        self._selective = self._solve_selective(rows, at_of)
        self._outer = np.zeros((2, len(places), n))
        for first in range(len(places) - 2, -1, -1):
            self._solve_outer(first)

    @property
    def costs(self) -> Costs:
        """The least extra operations of the whole step, by amount of memory."""
        found: Costs = self._outer[1, 0]
        return found

    def plan(self, slot: int) -> Ranges:
        """Returns the plan that has the least extra operations in this amount of memory."""
        found: list[Range] = []
        first, held = 0, PART
        while first < len(self.places) - 1:
            one, need = self._cells[first, held], self._need_of(first, held)
            kept = self._outer[one.out_held, first + 1, slot - one.added] if slot >= need else INFINITE
            boundary = self._missing(first, held)
            costs = self._outer_column(first, slot - boundary)
            option = self._best_selective(first, slot, min(kept, costs.min(initial=INFINITE)), held)
            if option is not None:
                found.append(option.range)
                first, held, slot = option.last, option.out_held, slot - option.added
                continue
            if kept <= costs.min(initial=INFINITE):
                first, held, slot = first + 1, one.out_held, slot - one.added
                continue
            slot -= boundary
            last = int(self._ends[first][int(costs.argmin())])
            found.append(Range(self.places[first], self.places[last], self._inner_plan(first, last, slot)))
            first, held = last, int(self._is_same(first, last))
        return tuple(found)

    # --- the tables

    def _solve_inner(self, start: int, last: int) -> None:
        """Solve what is left of a range that ends at `last` when it runs again, from each place since `start`."""
        table = np.empty((2, last - start, self._n))
        spans = np.empty((2, 2, last - start), dtype=np.int64)
        self._columns[last] = start, table, spans
        for first in range(last - 1, start - 1, -1):
            recomputed = self._recompute_inner(first, last)
            for held in (NOTHING, PART):
                best = table[held, first - start]
                self._best_inner(first, last, held, recomputed, best)
                spans[:, held, first - start] = _span(best)
            ends = self._listed_ends.get(first, ())
            at = bisect_left(ends, last)
            if at < len(ends) and ends[at] == last:
                again, span = table[PART, first - start], spans[:, PART, first - start]
                if self._between[self.places[first]].is_partial:  # but a range holds all of its input
                    again = self._best_inner(first, last, ALL, recomputed, np.empty(self._n))
                    span = np.array(_span(again))
                np.add(again, self._work(first, last), out=self._again[first][at])
                self._again_spans[first][:, at] = span

    def _best_inner(self, first: int, last: int, held: int, recomputed: Costs | None, best: Costs) -> Costs:
        """Fills in the least costs of cells `first` to `last` when a range runs again, by what is held before them."""
        start, table, _ = self._columns[last]
        need, added, cost, out_held = self._keep_inner(first, last, held)
        best[:need] = INFINITE
        if need < self._n:
            rest = table[out_held, first + 1 - start] if first + 1 < last else None
            best[need:] = cost if rest is None else rest[need - added : self._n - added] + cost
        shift = self._missing(first, held)
        if recomputed is not None and shift < self._n:
            np.minimum(best[shift:], recomputed[: self._n - shift], out=best[shift:])
        return best

    def _recompute_inner(self, first: int, last: int) -> Costs | None:
        """Returns the least costs of cells `first` to `last` if a range begins with the first, whose input is held."""
        ends = self._ends_before(first, last)
        if len(ends) == 0:
            return None
        start, table, spans = self._columns[last]
        after, n_same = _as_slice(ends, start), min(self._same_ends[first], len(ends))
        begins, settled = np.maximum(self._again_spans[first][:, : len(ends)], spans[:, 0, after])
        if n_same:
            same = _as_slice(ends[:n_same], start)
            begins[:n_same], settled[:n_same] = np.maximum(self._again_spans[first][:, :n_same], spans[:, 1, same])
        # The range also runs forward, which needs memory too.
        needs = self._running_needs(first, ends, self._units[self.places[last] - 1].backward_base)
        low = int(np.maximum(begins, needs).min())
        if low >= self._n:
            return None
        high = min(int(max(settled.max(), needs[-1])) + 1, self._n)
        again, costs = self._again[first][: len(ends), low:high], self._scratch[: len(ends), : high - low]
        np.add(again, table[0, after, low:high], out=costs)
        if n_same:
            np.add(again[:n_same], table[1, same, low:high], out=costs[:n_same])
        for at in np.flatnonzero(needs > begins):
            costs[at, : needs[at] - low] = INFINITE
        whole = np.empty(self._n)
        whole[:low] = INFINITE
        costs.min(axis=0, out=whole[low:high])
        whole[high:] = whole[high - 1]
        return whole

    def _ends_before(self, first: int, last: int) -> Slots:
        """Returns the places before `last` where ranges from `first` may end."""
        if first not in self._ends:
            return np.zeros(0, dtype=np.int64)
        return self._ends[first][: bisect_left(self._listed_ends[first], last)]

    def _inside(self, first: int, last: int, ends: Slots, slot: int) -> Costs:
        """Returns the costs in a slot of ranges from `first` to each end, run again and followed by the rest."""
        start, table, _ = self._columns[last]
        return self._followed(first, ends, slot, lambda held, ends: table[held, _as_slice(ends, start), slot])

    def _followed(self, first: int, ends: Any, slots: Any, rest: Any) -> Costs:
        """Returns the costs of ranges from `first` to each of the ends, and of the rest after each."""
        found: Costs = self._again[first][: len(ends), slots] + rest(0, ends)
        same = min(self._same_ends[first], len(ends))
        if same:
            found[:same] = self._again[first][:same, slots] + rest(1, ends[:same])
        return found

    def _solve_outer(self, first: int) -> None:
        for held in (NOTHING, PART):
            one, need = self._cells[first, held], self._need_of(first, held)
            best = self._outer[held, first]
            best[:need] = INFINITE
            if need < self._n:
                best[need:] = self._outer[one.out_held, first + 1, need - one.added : self._n - one.added]
        for held, option in self._selective.get(first, ()):
            best = self._outer[held, first, option.need :]
            after = self._outer[option.out_held, option.last, option.need - option.added : self._n - option.added]
            np.minimum(best, after + option.cost, out=best)
        ends = self._ends.get(first)
        if ends is None:
            return
        inside = self._outer_inside(first, slice(None))
        for costs, need in zip(inside, self._running_needs(first, ends, None), strict=True):
            costs[:need] = INFINITE
        whole = inside.min(axis=0)
        for held in (NOTHING, PART):
            shift = self._missing(first, held)
            if shift < self._n:
                best = self._outer[held, first, shift:]
                np.minimum(best, whole[: self._n - shift], out=best)

    def _solve_selective(self, rows: Sequence[Row], at_of: dict[int, int]) -> dict[int, list[tuple[int, _Selective]]]:
        """Returns the ranges that keep products, of single layers, by place: what is held of their input, and each."""
        found: dict[int, list[tuple[int, _Selective]]] = {}
        for start, stop in sorted({pair for row in rows for pair in itertools.pairwise(row)}):
            if start not in at_of or stop not in at_of or not self._units[start].may_start:
                continue
            for one in ranges_with_products(self._units, start, stop):
                for held in (NOTHING, PART):
                    cost = estimate(self._units, (one,), start, stop, held=held, between=self._between)
                    option = _Selective(
                        one,
                        at_of[stop],
                        held_after(self._units, one),
                        self._slots(cost.kept_bytes),
                        max(self._slots(cost.peak_bytes), self._slots(cost.kept_bytes)),
                        cost.extra_operations,
                    )
                    if option.need < self._n:
                        found.setdefault(at_of[start], []).append((held, option))
        return found

    def _outer_inside(self, first: int, slots: Any) -> Costs:
        """Returns the costs of all ranges from `first`, followed by the rest of the step."""
        ends = self._ends[first]
        found = self._followed(first, ends, slots, lambda held, ends: self._outer[held, _as_slice(ends, 0), slots])
        # Its forward pass is that of the step.
        work = self._work(first, ends)
        found -= work[:, None] if found.ndim > 1 else work
        return found

    def _work(self, first: int, last: Any) -> Any:
        """Returns the operations of a range's forward pass."""
        return self._operations[self._at[last]] - self._operations[self._at[first]]

    # --- entries of the tables

    def _slots(self, n_bytes: float) -> int:
        return round(n_bytes / self._quantum)

    def _needs(self, n_bytes: Costs) -> Costs:
        found: Costs = np.maximum(np.rint(n_bytes / self._quantum), 0)
        return found

    def _missing(self, first: int, held: int) -> int:
        """Returns the memory that a range adds which begins at a place, by what is held there."""
        return self._slots(self._between[self.places[first]].missing(held))

    def _cell(self, cell: int, held: int) -> _Kept:
        before, running, tops, total, kept = [], [], [0, 0], 0, 0
        for at in range(self.places[cell], self.places[cell + 1]):
            unit, boundary = self._units[at], self._between[at]
            added, out_held = after_keeping(unit, boundary, held)
            before.append(total)
            running.append(boundary.missing(held))
            kept += added  # rounded once for all units: what is less than the quantum adds up
            total = self._slots(kept)
            for again in (False, True):
                need = unit.backward_need(again=again, input_held=held > NOTHING)
                tops[again] = max(tops[again], total + (0 if need is None else max(self._slots(need), 0)))
            held = out_held
        return _Kept(held, total, np.array(before, dtype=float), np.array(running, dtype=float), *tops)

    def _need_of(self, cell: int, held: int) -> int:
        """Returns the least memory for a cell outside of ranges."""
        one, units = self._cells[cell, held], slice(self.places[cell], self.places[cell + 1])
        running = one.running + self._forward_base[units] + self._forward_bytes[units]
        return max(one.top, int((one.before + self._needs(running)).max()))

    def _keep_inner(self, first: int, last: int, held: int) -> tuple[int, int, float, int]:
        """Returns for a cell in a range that runs again: least memory, memory added, cost, how its output is held."""
        start, stop, end = self.places[first], self.places[first + 1], self.places[last]
        # Running again stops in the last unit that keeps anything, and does not reach those after it.
        saving = min(max(self._saving_before[end], start - 1), stop)
        key = first, held, self._units[end - 1].backward_base, saving
        if key not in self._kept_inside:
            self._kept_inside[key] = self._keep_up_to(*key)
        return self._kept_inside[key]

    def _keep_up_to(self, first: int, held: int, base: int, saving: int) -> tuple[int, int, float, int]:
        """Returns the same, from what it depends on: where running again stops and what is held when it begins."""
        one, start, stop = self._cells[first, held], self.places[first], self.places[first + 1]
        runs = self._forward_bytes[start:stop] + self._again_bytes[start:stop]
        if start <= saving < stop:
            runs[saving - start] = self._units[saving].stopped_bytes + self._units[saving].again_bytes
        needs = self._needs(one.running + runs + base)
        ran = min(saving + 1, stop)
        needs[ran - start :] = 0
        cost = self._operations[ran] - self._operations[start]
        if start <= saving < stop:
            cost -= self._units[saving].tail_operations
        return max(one.again_top, int((one.before + needs).max())), one.added, float(cost), one.out_held

    def _running_needs(self, first: int, ends: Slots, base: int | None) -> Slots:
        """Returns the memory that running forward needs, for ranges from `first` to each of the ends."""
        start = self.places[first]
        if base is None:
            base = self._units[start].forward_base
        if (first, base) not in self._running_slots:
            self._running_slots[first, base] = self._needs(self._running_bytes(first) + base).astype(np.int64)
        return self._running_slots[first, base][: len(ends)]

    def _running_bytes(self, first: int) -> Costs:
        """Returns the bytes that running forward needs, for ranges from `first` to each of its ends."""
        if first not in self._running:
            start, stop = self.places[first], self.places[int(self._ends[first][-1])]
            needed = self._dropping[start:stop].copy()
            needed[0] -= self._between[start].n_bytes
            at, maker, size = self._alongside.T
            inside = (maker >= start) & (at > start) & (at < stop)
            needed += np.bincount(at[inside] - start, weights=size[inside], minlength=stop - start)
            self._running[first] = np.maximum.accumulate(needed)[self._at[self._ends[first]] - start - 1]
        return self._running[first]

    def _is_same(self, first: int, last: int) -> bool:
        """Returns whether the output of a range is the input that it holds."""
        return self.places[last] <= self._same_until[self.places[first]]

    def _n_same(self, first: int, ends: Any) -> int:
        """Returns how many ranges from `first`, to each of the ends, have their input as output."""
        return int(np.searchsorted(self._at[ends], self._same_until[self.places[first]], side="right"))

    # --- back from costs to a plan

    def _outer_column(self, first: int, slot: int) -> Costs:
        if slot < 0 or first not in self._ends:
            return np.zeros(0)
        costs = self._outer_inside(first, slot)
        costs[self._running_needs(first, self._ends[first], None) > slot] = INFINITE
        return costs

    def _best_selective(self, first: int, slot: int, below: float, held: int) -> _Selective | None:
        """Returns the range that keeps products and costs least with the rest of the step, if less than `below`."""
        best = None
        for of, option in self._selective.get(first, ()):
            if of == held and option.need <= slot:
                cost = option.cost + self._outer[option.out_held, option.last, slot - option.added]
                if cost < below:
                    best, below = option, cost
        return best

    def _inner_plan(self, first: int, last: int, slot: int) -> Ranges:
        found: list[Range] = []
        held = ALL
        start, table, _ = self._columns[last]
        while first < last:
            need, added, cost, out_held = self._keep_inner(first, last, held)
            kept = INFINITE if slot < need else cost
            if first + 1 < last and slot >= need:
                kept += table[out_held, first + 1 - start, slot - added]
            boundary = self._missing(first, held)
            ends = self._ends_before(first, last)
            costs = np.zeros(0)
            if len(ends) and slot >= boundary:
                costs = self._inside(first, last, ends, slot - boundary)
                base = self._units[self.places[last] - 1].backward_base
                costs[self._running_needs(first, ends, base) > slot - boundary] = INFINITE
            if kept <= costs.min(initial=INFINITE):
                first, held, slot = first + 1, out_held, slot - added
                continue
            slot -= boundary
            at = int(ends[int(costs.argmin())])
            found.append(Range(self.places[first], self.places[at], self._inner_plan(first, at, slot)))
            first, held = at, int(self._is_same(first, at))
        return tuple(found)


def _span(costs: Costs) -> tuple[int, int]:
    """Returns the first slot where falling costs are finite, and the first from where on they stay the same."""
    rising = costs[::-1]
    return len(costs) - int(rising.searchsorted(INFINITE)), len(costs) - int(rising.searchsorted(costs[-1], "right"))


def _as_slice(places: Any, start: int) -> Any:
    """Returns places as indices after `start`: as a slice, which needs no copy, if they follow one another."""
    if int(places[-1]) - int(places[0]) + 1 == len(places):
        return slice(int(places[0]) - start, int(places[-1]) + 1 - start)
    return places - start


def _same_until(units: Sequence[Unit]) -> list[int]:
    """Returns for each unit the place up to which all storages are that of its input."""
    found = [len(units)] * (len(units) + 1)
    for at in range(len(units) - 1, -1, -1):
        found[at] = found[at + 1] if units[at].same_storage else at
    return found


def _flat_rows(units: Sequence[Unit]) -> list[Row]:
    """Returns the longest rows of units of one chain that may be recomputed."""
    found: list[Row] = []
    start = 0
    while start < len(units):
        stop = start
        while (
            stop < len(units)
            and units[stop].chain is not None
            and not units[stop].pinned
            and units[stop].chain == units[start].chain
        ):
            stop += 1
        if stop > start:
            found.append(tuple(range(start, stop + 1)))
        start = max(stop, start + 1)
    return found


def _stretches(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Returns the first and the last place of the rows that lie in no other."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted({(row[0], row[-1]) for row in rows}, key=lambda one: (one[0], -one[1])):
        if not found or start >= found[-1][1]:
            found.append((start, stop))
    return found


def _most_common(sizes: Sequence[int], units: Sequence[Unit]) -> int:
    inside = [sizes[at] for at, unit in enumerate(units) if unit.chain is not None and sizes[at] > 0]
    return max(set(inside), key=inside.count) if inside else 0
