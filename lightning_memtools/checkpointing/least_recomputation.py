"""Chooses which parts of a step to run twice: the least recomputation for every amount of memory at once.

A dynamic program over the units of the forward pass, from the last to the first. For each amount of memory, a unit
either keeps its tensors, or begins a span of units that keeps only its input and runs again in backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memtools.checkpointing.apply_plan import ChainPlan, Range
from lightning_memtools.checkpointing.chains import Chain, outermost
from lightning_memtools.checkpointing.step_units import StepUnits, Unit

_SLOTS = 2000
_RANGE = 1e-4  # the time of the host for one more range, as a part of the operations of the forward pass
_INFINITE = float("inf")
_MOST_PLACES = 100  # in a Sequential where ranges begin and end
_MOST_OF_FORWARD = 0.5  # of the operations: running more than this again as a whole gains little

Span = tuple[int, int]
"""The first unit of a part that may run twice, and the index after its last."""
Layer = tuple[int, Span]
"""The index of a layer in its chain, and its units."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training step that may run twice: consecutive layers of a Sequential, and whole modules.

    Attributes:
        spans: Maps each span of units that may run twice to the index of its chain and the range of its layers.
        forced: The spans that must run twice.
        left_out: For each layer (by name) that may not run twice, the reason.
        chains: The chains of the model.
        rows: For each chain, its groups of consecutive layers that may all run twice.
        step: The step, cut into units: stretches of the forward pass between layer boundaries.
    """

    spans: dict[Span, tuple[int, Range]]
    forced: list[Span]
    left_out: dict[str, str]
    chains: Sequence[Chain]
    rows: list[list[list[Layer]]]
    step: StepUnits

    @staticmethod
    def of(step: StepUnits, chains: Sequence[Chain]) -> StepParts:
        """Return the parts of a step that may run twice. If a chain is called twice, only its first call counts."""
        work = [0, *itertools.accumulate(unit.operations for unit in step.units)]
        own = {chain.name for chain in chains if chain.is_module}  # a layer that FSDP 2 shards is a module of its own
        parts = StepParts({}, [], {}, chains, [], step)
        for index, chain in enumerate(chains):
            changed = {at: why for (of, at), why in step.changed.items() if of == index}
            # Of modules, only what running showed: that a module may not run twice leaves those inside of it.
            known = changed if chain.is_module and not chain.forced else chain.outside | changed
            names = {at: name for at, name in enumerate(chain.layers) if chain.is_module or name not in own}
            parts.left_out.update({name: known[at] for at, name in names.items() if at in known})
            parts.rows.append(list(_rows(step, index, chain, {*chain.outside, *changed})))
            for row in parts.rows[-1]:
                begins, ends = _thinned(row, step.units)
                for (at, start), (last, stop) in itertools.product(begins, ends):
                    is_large = chain.is_module and work[stop] - work[start] > _MOST_OF_FORWARD * work[-1]
                    if last >= at and (chain.forced or not is_large):
                        parts.spans.setdefault((start, stop), (index, Range(at, last + 1)))
                if chain.forced and step.units[row[0][1][0]].may_start:
                    parts.forced.append(row[0][1])
                elif chain.forced:
                    parts.left_out[chain.name] = "it writes to its input"
        return parts

    def chunks(self, segments: int) -> tuple[ChainPlan, ...]:
        """Cut the outermost Sequentials into equal chunks; return plans that recompute all chunks but the last.

        As in `torch.utils.checkpoint.checkpoint_sequential`, the last chunk runs as usual, since it would be recomputed
        right away. Layers that may not run twice are left out.
        """
        plans: list[ChainPlan] = []
        for chain in outermost(self.chains):
            length = max(len(chain.layers) // segments, 1)
            ranges: list[Range] = []
            for row in self.rows[self.chains.index(chain)]:
                for number in range(min(segments, len(chain.layers)) - 1):
                    chunk = [(at, start) for at, (start, _) in row if at // length == number]
                    first = next((at for at, start in chunk if self.step.units[start].may_start), None)
                    ranges += [] if first is None else [Range(first, chunk[-1][0] + 1)]
            plans += [ChainPlan(chain.name, chain.layers, tuple(ranges))] if ranges else []
        return tuple(plans)

    def plans(self, spans: Sequence[Span]) -> tuple[ChainPlan, ...]:
        """Return a plan for each chain that has layers in these spans of units."""
        ranges: dict[int, list[Range]] = {}
        for span in spans:
            index, layers = self.spans[span]
            ranges.setdefault(index, []).append(layers)
        chains = ((self.chains[index], sorted(of_chain)) for index, of_chain in sorted(ranges.items()))
        return tuple(ChainPlan(chain.name, chain.layers, tuple(each), chain.is_module) for chain, each in chains)


def _rows(step: StepUnits, index: int, chain: Chain, outside: set[int]) -> Iterator[list[Layer]]:
    row: list[Layer] = []
    for at in range(len(chain.layers)):
        start, stop = step.spans.get((index, at), (0, 0))
        may = at not in outside and start < stop
        if row and (not may or row[-1][1][1] != start):
            yield row
            row = []
        row += [(at, (start, stop))] if may else []
    if row:
        yield row


def _thinned(row: list[Layer], units: Sequence[Unit]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return places, as (layer, unit), where ranges may begin and end. Of many, keep those with small inputs."""
    begins, ends = [(at, start) for at, (start, _) in row], [(at, stop) for at, (_, stop) in row]
    if len(row) > _MOST_PLACES:
        between = _boundaries(units)
        size = math.ceil((len(row) - 1) / _MOST_PLACES)
        groups = (range(first, min(first + size, len(row))) for first in range(1, len(row), size))
        chosen = [min(group, key=lambda at: between[begins[at][1]]) for group in groups]
        ends = [ends[at] for at in (*(at - 1 for at in chosen), len(row) - 1)]
        begins = [begins[at] for at in (0, *chosen)]
    return begins, ends


class LeastRecomputation:
    """Finds the layers to recompute that cost the fewest extra operations, for each limit on a step's memory.

    Args:
        parts: The parts of the step that may run twice.
        limit_bytes: The largest memory limit to solve for.
    """

    def __init__(self, parts: StepParts, limit_bytes: int) -> None:
        self._parts, self._units, self._forced = parts, parts.step.units, dict(parts.forced)
        self._slot = limit_bytes / _SLOTS
        self._range = _RANGE * sum(unit.operations for unit in self._units)
        self._between = _boundaries(self._units)
        ends: dict[int, set[int]] = {}
        for start, stop in (*parts.spans, *parts.forced):
            if self._units[start].may_start:
                ends.setdefault(start, set()).add(stop)
        self._options = {start: list(_needs(self._units, self._between, start, stops)) for start, stops in ends.items()}
        plain = [0.0]
        held = True
        for unit in self._units:
            added, held = unit.keep(input_held=held)
            plain.append(plain[-1] + added)
        # Differences of rounded sums: many small units would all be rounded to nothing.
        self._added = np.diff(np.rint(np.array(plain) / self._slot)).astype(int)
        self._plain = plain
        # The least operations for units from here on, by whether their input is held and by the memory that is left.
        self._table = np.full((len(self._units) + 1, 2, _SLOTS + 1), _INFINITE)
        self._table[-1] = 0.0
        for at in range(len(self._units) - 1, -1, -1):
            for held in (False, True):
                self._table[at, int(held)] = np.min([costs for _, costs in self._choices(at, held=held)], axis=0)

    def frontier(self) -> list[tuple[int, int]]:
        """Return the Pareto front of peak memory and extra work, as (bytes, operations), highest peak first."""
        costs = self._table[0, 1]
        return [
            (int(slot * self._slot) + 1, int(costs[slot]))
            for slot in range(_SLOTS, -1, -1)
            if costs[slot] < _INFINITE and (slot == 0 or costs[slot - 1] > costs[slot])
        ]

    def best(self, limit_bytes: float) -> tuple[ChainPlan, ...] | None:
        """Return the plans with the least recomputation that keep the peak within a limit; None if none can."""
        left, at, held = min(int(limit_bytes / self._slot), _SLOTS), 0, True
        if left < 0 or self._table[0, 1, left] == _INFINITE:
            return None
        spans: list[Span] = []
        while at < len(self._units):
            choices = list(self._choices(at, held=held))
            (stop, used, held), _ = min(choices, key=lambda choice: choice[1][left])
            spans += [] if stop is None else [(at, stop)]
            at, left = stop if stop is not None else at + 1, left - used
        return self._parts.plans(spans)

    def _choices(self, at: int, *, held: bool) -> Iterator[tuple[tuple[int | None, int, bool], np.ndarray]]:
        """Yield the choices for a unit: (end of a recomputed span or None, memory slots, is output held), and costs."""
        unit = self._units[at]
        size = 0 if held else self._between[at]
        if at not in self._forced:
            added, out_held = unit.keep(input_held=held)
            slots = max(int(self._added[at]) + round((added - self._plain[at + 1] + self._plain[at]) / self._slot), 0)
            need = max(added + unit.backward_need, size + unit.forward_base + unit.forward_bytes)
            yield (None, slots, out_held), self._shifted(at + 1, slots, need, 0, held=out_held)
        for stop, anyway, need, operations in self._options.get(at, ()):
            if self._forced.get(at, stop) == stop:
                slots = round((size + anyway) / self._slot)
                costs = self._shifted(stop, slots, size + need, operations + self._range, held=False)
                yield (stop, slots, False), costs

    def _shifted(self, then: int, slots: int, need: float, operations: float, *, held: bool) -> np.ndarray:
        costs = np.full(_SLOTS + 1, _INFINITE)
        first = max(slots, round(need / self._slot))
        if first <= _SLOTS:
            costs[first:] = self._table[then, int(held), first - slots : _SLOTS + 1 - slots] + operations
        return costs


def _boundaries(units: Sequence[Unit]) -> list[int]:
    """Return the size of each unit's input tensors, followed by the size of the last unit's output."""
    passed = [0]
    for unit in units:
        passed.append(unit.out_bytes or (passed[-1] if unit.same_storage else 0))
    return passed


def _needs(
    units: Sequence[Unit], between: Sequence[int], start: int, stops: set[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the costs of recomputing each span of units that begins at `start` and ends at one of `stops`.

    Items are (end, bytes that later units keep anyway, bytes that a rerun needs besides the input, operations).
    """
    kept, held, first, forward, backward, operations, again = 0, True, 0, 0, 0, 0, 0
    shared: list[tuple[int, int, int]] = []
    for at in range(start, max(stops)):
        unit = units[at]
        first = max(first, (0 if at == start else between[at]) + unit.forward_base + unit.forward_bytes)
        forward = max(forward, kept + (0 if held else between[at]) + unit.forward_bytes)
        added, held = unit.keep(input_held=held)
        kept += added
        backward = max(backward, kept + unit.backward_need)
        again = again if unit.again is None else operations + unit.again
        operations += unit.operations
        shared += [
            (last, size, at + 1 if handed_on else 0)
            for last, size, is_input, handed_on in unit.shared
            if not is_input or at > start
        ]
        if at + 1 in stops:
            anyway = sum(size for last, size, before in shared if last > at and before != at + 1)
            yield at + 1, anyway, max(first, backward, forward + unit.backward_base), again
