"""Chooses which units to recompute, by a dynamic program over the units of a step.

The program is that of Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019): the least recomputation of units i to j in m bytes either keeps the tensors of
unit i, or recomputes units i to k from the input of i when the backward pass of the rest is done. Here it also knows
that a kept tensor can be the output of one unit and the input of the next, that running again stops at the last tensor
that was kept, and that some units may not be recomputed. All budgets are solved at once: a state holds a cost per
amount of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_memtools.checkpointing.memory_model import (
    Range,
    Ranges,
    Unit,
    after_keeping,
    boundary_bytes,
    last_saving,
)

Costs = np.ndarray[Any, np.dtype[np.float64]]
INFINITE = float("inf")


class OptimalRanges:
    """All plans of least recomputation, by the memory that they may take.

    Args:
        units: The units of a step, in the order of its forward pass.
        limit_bytes: The largest amount of memory to solve for, usually the peak of the plain step.
        resolution: The number of amounts that this is divided into. Sizes are rounded to the nearest.
    """

    def __init__(self, units: Sequence[Unit], limit_bytes: int, resolution: int = 1000) -> None:
        self._units = list(units)
        self._sizes = boundary_bytes(units)
        # The tensors between units add up: a quantum that divides their most common size rounds nothing there.
        self._quantum = max(limit_bytes / resolution, 1.0)
        often = _most_common(self._sizes, units)
        if often > self._quantum:
            self._quantum = often / round(often / self._quantum)
        self._n = int(limit_bytes / self._quantum) + 1
        self._inner: dict[tuple[int, int, bool], Costs] = {}
        self._outer: dict[tuple[int, bool], Costs] = {}
        self._operations = np.concatenate([[0], np.cumsum([unit.operations for unit in units])])
        self._solve()

    def frontier(self) -> list[tuple[int, int]]:
        """Returns peak in bytes and extra operations of every plan that no other one beats, by falling peak."""
        costs = self._outer[0, True]
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
        """Returns the plan of least recomputation whose peak is within the limit; None if there is none."""
        slot = min(int(limit_bytes / self._quantum + 1e-6), self._n - 1)
        if slot < 0 or self._outer[0, True][slot] == INFINITE:
            return None
        return tuple(self._unwind_outer(slot))

    # --- the tables

    def _solve(self) -> None:
        units = self._units
        for start, stop in _stretches(units):
            for last in range(start + 1, stop + 1):
                for first in range(last - 1, start - 1, -1):
                    recomputed = self._recompute_inner(first, last)
                    for held in (False, True):
                        best = self._keep_inner(first, last, held)
                        if recomputed is not None:
                            boundary = 0 if held else self._slots(self._sizes[first])
                            best = np.minimum(best, _shifted(recomputed, boundary))
                        self._inner[first, last, held] = best
        end = np.zeros(self._n)
        self._outer[len(units), False] = self._outer[len(units), True] = end
        for first in range(len(units) - 1, -1, -1):
            for held in (False, True):
                self._outer[first, held] = self._least_outer(first, held)

    def _recompute_inner(self, first: int, last: int) -> Costs | None:
        """Returns the least costs of units `first` to `last` if a range begins with the first, whose input is held."""
        stops = range(first + 1, last)
        if not self._units[first].may_start or not stops:
            return None
        rest_held = self._rest_held(first, last)
        inside = np.stack([self._inner[first, at, True] for at in stops])
        inside += [self._inner[at, last, rest_held[at]] for at in stops]
        inside += (self._operations[first + 1 : last] - self._operations[first])[:, None]
        # The range also runs forward, which needs memory too.
        needs = self._running_needs(first, last - 1, self._units[last - 1].backward_base)
        inside[np.arange(self._n)[None, :] < needs[:, None]] = INFINITE
        whole: Costs = inside.min(axis=0)
        return whole

    def _keep_inner(self, first: int, last: int, held: bool) -> Costs:
        stop = last_saving(self._units, first, last)
        unit, out_held, added, need, top = self._keeping(first, held, self._units[last - 1].backward_base, stop)
        cost = 0 if first > stop else unit.operations - (unit.tail_operations if first == stop else 0)
        rest = np.zeros(self._n) if first + 1 == last else self._inner[first + 1, last, out_held]
        return self._kept(rest, cost, added, need, top)

    def _least_outer(self, first: int, held: bool) -> Costs:
        _, out_held, added, need, top = self._keeping(first, held, None)
        best = self._kept(self._outer[first + 1, out_held], 0, added, need, top)
        stops = self._outer_stops(first)
        if stops:
            rest_held = self._rest_held(first, stops[-1])
            inside = np.stack([self._inner[first, at, True] for at in stops])
            after = np.stack([self._outer[at, rest_held[at]] for at in stops])
            needs = self._running_needs(first, stops[-1], None)
            whole = np.where(np.arange(self._n)[None, :] >= needs[:, None], inside + after, INFINITE)
            boundary = 0 if held else self._slots(self._sizes[first])
            best = np.minimum(best, _shifted(whole.min(axis=0), boundary))
        return best

    def _outer_stops(self, first: int) -> range:
        unit = self._units[first]
        if unit.chain is None or unit.pinned or not unit.may_start:
            return range(0)
        stop = first
        while stop < len(self._units) and self._units[stop].chain == unit.chain and not self._units[stop].pinned:
            stop += 1
        return range(first + 1, stop + 1)

    # --- entries of the tables

    def _slots(self, n_bytes: int) -> int:
        return round(n_bytes / self._quantum)

    def _need(self, n_bytes: int) -> int:
        return max(round(n_bytes / self._quantum), 0)

    def _keeping(
        self, first: int, held: bool, base: int | None, stop: int | None = None
    ) -> tuple[Unit, bool, int, int, int]:
        unit = self._units[first]
        added, out_held = after_keeping(unit, input_held=held, in_bytes=self._sizes[first])
        missing = 0 if held else self._sizes[first]
        # Running again stops in the last unit that keeps anything (`stop`), and does not reach those after it.
        runs = unit.stopped_bytes if first == stop else unit.forward_bytes
        need = self._need(missing + runs + (unit.forward_base if base is None else base))
        if stop is not None and first > stop:
            need = 0
        top = 0 if unit.backward_peak is None else self._need(unit.backward_peak)
        return unit, out_held, self._slots(added), need, top

    def _kept(self, rest: Costs, cost: int, added: int, need: int, top: int) -> Costs:
        out = _shifted(rest, added) + cost
        out[: min(max(need, top + added), self._n)] = INFINITE
        return out

    def _running_needs(self, first: int, last: int, base: int | None) -> Any:
        """Returns the memory that running forward needs, for ranges from `first` that end after each unit to `last`."""
        needs = []
        highest = 0
        for at in range(first, last):
            unit = self._units[at]
            missing = 0 if at == first else self._sizes[at]
            below = unit.forward_base if base is None else base
            highest = max(highest, self._need(missing + below + unit.dropping_bytes))
            needs.append(highest)
        return np.array(needs)

    def _rest_held(self, first: int, last: int) -> dict[int, bool]:
        """Returns for each end of a range from `first` whether its output is the input that the range holds."""
        same, found = True, {}
        for at in range(first, last):
            same = same and self._units[at].same_storage
            found[at + 1] = same
        return found

    # --- back from costs to a plan

    def _unwind_outer(self, slot: int) -> list[Range]:
        found: list[Range] = []
        first, held = 0, True
        while first < len(self._units):
            target = self._outer[first, held][slot]
            _, out_held, added, need, top = self._keeping(first, held, None)
            if self._kept(self._outer[first + 1, out_held], 0, added, need, top)[slot] == target:
                first, held, slot = first + 1, out_held, slot - added
                continue
            slot -= 0 if held else self._slots(self._sizes[first])
            stops = self._outer_stops(first)
            rest_held, needs = self._rest_held(first, stops[-1]), self._running_needs(first, stops[-1], None)
            at = next(
                at
                for at in stops
                if needs[at - first - 1] <= slot
                and self._inner[first, at, True][slot] + self._outer[at, rest_held[at]][slot] == target
            )
            found.append(Range(first, at, tuple(self._unwind_inner(first, at, slot))))
            first, held = at, rest_held[at]
        return found

    def _unwind_inner(self, first: int, last: int, slot: int) -> list[Range]:
        found: list[Range] = []
        held = True
        while first < last:
            target = self._inner[first, last, held][slot]
            base = self._units[last - 1].backward_base
            if self._keep_inner(first, last, held)[slot] == target:
                _, held, added, _, _ = self._keeping(first, held, base)
                first, slot = first + 1, slot - added
                continue
            slot -= 0 if held else self._slots(self._sizes[first])
            rest_held, needs = self._rest_held(first, last), self._running_needs(first, last - 1, base)
            at = next(
                at
                for at in range(first + 1, last)
                if needs[at - first - 1] <= slot
                and self._inner[first, at, True][slot]
                + self._inner[at, last, rest_held[at]][slot]
                + (self._operations[at] - self._operations[first])
                == target
            )
            found.append(Range(first, at, tuple(self._unwind_inner(first, at, slot))))
            first, held = at, rest_held[at]
        return found


def _stretches(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """Returns the longest rows of units of one chain that may be recomputed."""
    found: list[tuple[int, int]] = []
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
            found.append((start, stop))
        start = max(stop, start + 1)
    return found


def _shifted(costs: Costs, slots: int) -> Costs:
    """Returns the costs when this much of the memory is taken already."""
    out = np.full_like(costs, INFINITE)
    if slots < len(costs):
        out[slots:] = costs[: len(costs) - slots]
    return out


def _most_common(sizes: Sequence[int], units: Sequence[Unit]) -> int:
    inside = [sizes[at] for at, unit in enumerate(units) if unit.chain is not None and sizes[at] > 0]
    return max(set(inside), key=inside.count) if inside else 0
