"""Chooses which units to recompute, by a dynamic program over the units of a step.

The program is that of Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019): the least recomputation of units i to j in m bytes either keeps the tensors of
unit i, or recomputes units i to k from the input of i when the backward pass of the rest is done. All budgets are
solved at once: a table holds a cost per amount of memory.

Its time grows with the cube of the number of places where a range may begin or end: of long chains it takes some.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_memtools.checkpointing.memory_model import (
    Range,
    Ranges,
    Unit,
    boundaries,
    estimate,
    held_after,
    joined,
    ranges_with_products,
)

Costs = np.ndarray[Any, np.dtype[np.float64]]
INFINITE = float("inf")

Row = tuple[int, ...]
"""Places between layers that run one after the other: a range may begin at each and end at each later one."""

_RESOLUTION = 2000
_MOST_PLACES = 100  # in a row
# Places, to the power of three and two, over all chains: about 1 s, and 200 MB of tables.
_MOST_TRANSITIONS = 128**3 // 3
_MOST_STATES = 160**2 // 2


class _WithProducts(NamedTuple):
    """A range that keeps products: where it ends, whether its output is held then, memory and operations."""

    range: Range
    last: int
    out_held: int
    need: int
    added: int
    cost: float


class OptimalRanges:
    """All plans of least recomputation, by the memory that they may take.

    Args:
        units: The units of a step, in the order of its forward pass.
        limit_bytes: The largest amount of memory to solve for, usually the peak of the plain step.
        rows: The ranges that there may be, nested in any way; None for those that the units' chains allow.
        resolution: The number of amounts that this is divided into. Sizes are rounded to the nearest.
    """

    def __init__(
        self, units: Sequence[Unit], limit_bytes: int, rows: Sequence[Row] | None = None, resolution: int = _RESOLUTION
    ) -> None:
        rows = _few_enough(units, _flat_rows(units) if rows is None else rows)
        between = boundaries(units)
        self._places = _places_of(units, rows)
        # Between two neighbouring places lies a cell: units of which either all are in a range or none is.
        self._cells = [joined(units, start, stop, between[start]) for start, stop in itertools.pairwise(self._places)]
        self._between = [between[place] for place in self._places]
        self._work = np.cumsum([0, *(cell.operations for cell in self._cells)], dtype=np.float64)
        # The tensors between units add up: a quantum that divides their most common size rounds nothing there.
        self._quantum = max(limit_bytes / resolution, 1.0)
        inside = [between[at] for at, unit in enumerate(units) if unit.chain is not None and between[at]]
        often = max(set(inside), key=inside.count) if inside else 0
        if often > self._quantum:
            self._quantum = often / round(often / self._quantum)
        self._n = int(limit_bytes / self._quantum) + 1

        at_of = {place: at for at, place in enumerate(self._places)}
        self._ends = {
            at_of[first]: [at_of[last] for last in lasts]
            for first, lasts in _ends(rows).items()
            if units[first].may_start
        }
        # For each range, its costs when it runs again and before that forward; and whether its output is its input.
        self._again = {first: np.empty((len(ends), self._n)) for first, ends in self._ends.items()}
        self._same = {
            first: np.array([all(cell.same_storage for cell in self._cells[first:last]) for last in ends], dtype=int)
            for first, ends in self._ends.items()
        }
        # For each place where a range may end: its least start, and the costs from each place since on.
        self._tables: dict[int, tuple[int, Costs]] = {}
        self._products: dict[int, list[_WithProducts]] = {}
        for last in sorted({last for ends in self._ends.values() for last in ends}):
            firsts = [first for first, ends in self._ends.items() if last in ends]
            table = self._solve(min(firsts), last, again=True)
            self._tables[last] = min(firsts), table
            for first in firsts:
                self._again[first][self._ends[first].index(last)] = (
                    table[1, first - min(firsts)] + self._work[last] - self._work[first]
                )
        self._products = self._ranges_with_products(units, rows, at_of)
        self._outer = self._solve(0, len(self._cells), again=False)

    def frontier(self) -> list[tuple[int, int]]:
        """Return peak in bytes and extra operations of every plan that no other one beats, by falling peak."""
        costs = self._outer[1, 0] - self._work[-1]
        points: list[tuple[int, int]] = []
        for slot in range(self._n - 1, -1, -1):
            if costs[slot] == INFINITE:
                break
            if points and costs[slot] == points[-1][1]:
                points.pop()
            # Up: `best` of what is returned here must find this slot again, and not the one below.
            points.append((math.ceil(slot * self._quantum), int(costs[slot])))
        return points

    def best(self, limit_bytes: float) -> Ranges | None:
        """Return the plan of least recomputation whose peak is within the limit; None if there is none."""
        slot = min(int(limit_bytes / self._quantum + 1e-6), self._n - 1)
        if slot < 0 or self._outer[1, 0, slot] == INFINITE:
            return None
        return self._plan(0, len(self._cells), slot, again=False)

    def _solve(self, start: int, stop: int, *, again: bool) -> Costs:
        """Return the least costs from each cell on to `stop`: [whether its input is held, first - start, memory].

        `again`: these are what is left of a range that runs again; else of the step, whose first run counts too.
        """
        table = np.zeros((2, stop - start + 1, self._n))
        for first in range(stop - 1, start - 1, -1):
            recomputed = self._recompute(first, start, stop, table, again=again)
            for held in (0, 1):
                need, added, cost, out_held = self._keep(first, stop, held, again=again)
                best = table[held, first - start]
                best[:need] = INFINITE
                best[need:] = table[out_held, first + 1 - start, need - added : max(self._n - added, 0)] + cost
                missing = self._missing(first, held)
                if recomputed is not None and missing < self._n:
                    np.minimum(best[missing:], recomputed[: self._n - missing], out=best[missing:])
        return table

    def _keep(self, first: int, stop: int, held: int, *, again: bool) -> tuple[int, int, float, int]:
        """Return for a cell that is kept: least memory, memory added, cost, whether its output is held then."""
        cell = self._cells[first]
        added, out_held = cell.keep(input_held=bool(held))
        need = added + cell.backward_need(again=again, input_held=bool(held))
        # Running again stops at the last tensor that is kept.
        stops = again and not any(one.saves for one in self._cells[first + 1 : stop])
        cost = cell.operations - (cell.tail_operations if stops else 0)
        if cell.saves or not stops:
            base = self._cells[stop - 1].backward_base if again else cell.forward_base
            need = max(need, (0 if held else self._between[first]) + base + cell.forward_bytes)
        else:
            cost = 0
        return max(self._slots(need), self._slots(added)), self._slots(added), float(cost), int(out_held)

    def _recompute(self, first: int, start: int, stop: int, table: Costs, *, again: bool) -> Costs | None:
        """Return the least costs where a range begins with this cell, whose input is held."""
        ends = self._ends_within(first, stop, again=again)
        if not ends:
            return None
        found: Costs = self._options(first, start, ends, table, slice(None), again=again).min(axis=0)
        for one in () if again else self._products.get(first, ()):
            after = table[one.out_held, one.last - start, one.need - one.added : self._n - one.added]
            np.minimum(found[one.need :], after + one.cost, out=found[one.need :])
        return found

    def _options(self, first: int, start: int, ends: Sequence[int], table: Costs, slots: Any, *, again: bool) -> Costs:
        """Return the costs of each range from `first` to one of the ends, with the rest after it."""
        n = len(ends)
        found: Costs = self._again[first][:n, slots] + table[self._same[first][:n], np.array(ends) - start, slots]
        if not again:  # its first run needs memory too; within another range, no more than running again later
            needs = [cell.forward_base + cell.dropping_bytes for cell in self._cells[first : ends[-1]]]
            needs[1:] = map(sum, zip(needs[1:], self._between[first + 1 : ends[-1]], strict=True))
            slots_needed = np.rint(np.maximum.accumulate(needs) / self._quantum)[np.array(ends) - first - 1]
            found[np.greater.outer(slots_needed, np.arange(self._n)[slots])] = INFINITE
        return found

    def _ends_within(self, first: int, stop: int, *, again: bool) -> list[int]:
        ends = self._ends.get(first, [])
        return ends[: bisect_left(ends, stop)] if again else ends

    def _plan(self, start: int, stop: int, slot: int, *, again: bool) -> Ranges:
        """Return the ranges that have the least cost in this amount of memory."""
        found: list[Range] = []
        base, table = self._tables[stop] if again else (0, self._outer)
        first, held = start, 1
        while first < stop:
            least = table[held, first - base, slot]
            need, added, cost, out_held = self._keep(first, stop, held, again=again)
            if slot >= need and table[out_held, first + 1 - base, slot - added] + cost == least:
                first, held, slot = first + 1, out_held, slot - added
                continue
            slot -= self._missing(first, held)
            ends = self._ends_within(first, stop, again=again)
            options = self._options(first, base, ends, table, slot, again=again)
            at = int(options.argmin())
            if options[at] == least:
                last, held = ends[at], int(self._same[first][at])
                found.append(Range(self._places[first], self._places[last], self._plan(first, last, slot, again=True)))
                first = last
                continue
            for one in self._products[first]:
                if slot >= one.need and table[one.out_held, one.last, slot - one.added] + one.cost == least:
                    found.append(one.range)
                    first, held, slot = one.last, one.out_held, slot - one.added
                    break
        return tuple(found)

    def _ranges_with_products(
        self, units: Sequence[Unit], rows: Sequence[Row], at_of: dict[int, int]
    ) -> dict[int, list[_WithProducts]]:
        """Return the ranges of single layers that keep products, by place."""
        found: dict[int, list[_WithProducts]] = {}
        for start, stop in sorted({pair for row in rows for pair in itertools.pairwise(row)}):
            first, last = at_of[start], at_of[stop]
            for one in ranges_with_products(units, start, stop) if first in self._ends else ():
                cost = estimate(units[start:stop], (Range(0, stop - start, (), one.kept),))
                added = self._slots(cost.kept_bytes)
                need = max(self._slots(cost.peak_bytes), added)
                if need < self._n:
                    work = float(cost.extra_operations + self._work[last] - self._work[first])
                    option = _WithProducts(one, last, int(held_after(units, one)), need, added, work)
                    found.setdefault(first, []).append(option)
        return found

    def _missing(self, first: int, held: int) -> int:
        """Return the memory that a range adds which begins with a cell."""
        return 0 if held else self._slots(self._between[first])

    def _slots(self, n_bytes: float) -> int:
        return round(n_bytes / self._quantum)


def thinned(units: Sequence[Unit], row: Sequence[int], most: int) -> Row:
    """Return the first place of a row and at most `most` others, chosen where the tensor passed on is small."""
    if len(row) <= most:
        return tuple(row)
    sizes = boundaries(units)
    groups = np.array_split(np.array(row[1:-1]), most - 1)
    return row[0], *(min(map(int, one), key=lambda at: (not units[at].may_start, sizes[at])) for one in groups), row[-1]


def _few_enough(units: Sequence[Unit], rows: Sequence[Row]) -> list[Row]:
    """Return rows between whose places ranges take neither too long to solve nor too much memory."""
    found = [thinned(units, row, _MOST_PLACES) for row in rows]
    most = _MOST_PLACES
    while most > 1 and _is_too_much(found):
        outermost = set(_stretches(rows))
        found = [thinned(units, row, most) for row in rows if (row[0], row[-1]) in outermost]
        most = most * 3 // 4
    return found


def _is_too_much(rows: Sequence[Row]) -> bool:
    ends = _ends(rows)
    places = sorted({place for row in rows for place in row})
    at_of = {place: at for at, place in enumerate(places)}
    begun = [0, *(int(one) for one in np.cumsum([len(ends.get(place, ())) for place in places]))]
    columns = {last: first for first, lasts in sorted(ends.items(), reverse=True) for last in lasts}
    spans = [(at_of[first], at_of[last]) for last, first in columns.items()]
    transitions = sum(begun[last] - begun[first] for first, last in spans)
    return transitions > _MOST_TRANSITIONS or sum(last - first for first, last in spans) > _MOST_STATES


def _ends(rows: Sequence[Row]) -> dict[int, list[int]]:
    """Return for each place where ranges may begin the places where these may end."""
    found: dict[int, set[int]] = {}
    for row in rows:
        for at, first in enumerate(row[:-1]):
            found.setdefault(first, set()).update(row[at + 1 :])
    return {first: sorted(lasts) for first, lasts in found.items()}


def _places_of(units: Sequence[Unit], rows: Sequence[Row]) -> list[int]:
    """Return every place where a range may begin or end, and all places outside of ranges."""
    places = set(range(len(units) + 1))
    for start, stop in _stretches(rows):
        places -= set(range(start + 1, stop))
    return sorted(places.union(*rows))


def _stretches(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return the first and the last place of the rows that lie in no other."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted({(row[0], row[-1]) for row in rows}, key=lambda one: (one[0], -one[1])):
        if not found or start >= found[-1][1]:
            found.append((start, stop))
    return found


def _flat_rows(units: Sequence[Unit]) -> list[Row]:
    """Return the longest rows of units of one chain that may be recomputed."""
    alike = itertools.groupby(range(len(units)), lambda at: None if units[at].pinned else units[at].chain)
    groups = [[*found] for chain, found in alike if chain is not None]
    return [tuple(range(one[0], one[-1] + 2)) for one in groups]
