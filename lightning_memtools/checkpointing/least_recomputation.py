"""Chooses which parts of a step to run twice: the least recomputation for every amount of memory at once.

A dynamic program over the units of the forward pass, from the last to the first. For each amount of memory, a unit
either keeps its tensors, or begins a span of units that keeps only its input and runs again in backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_memtools.checkpointing.apply_plan import ChainPlan, Range
from lightning_memtools.checkpointing.chains import Chain, outermost
from lightning_memtools.checkpointing.step_units import StepUnits

_SLOTS = 2000
_RANGE = 1e-4  # the time of the host for one more range, as a part of the operations of the forward pass
_INFINITE = float("inf")
_MOST_PLACES = 100  # in a Sequential where ranges begin and end

Span = tuple[int, int]
"""The first unit of a part that may run twice, and the index after its last."""
Layer = tuple[int, Span]
"""The index of a layer in its chain, and its units."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training step that may run twice: consecutive layers of a Sequential, and whole modules.

    Attributes:
        step: The step, cut into units: the parts of the forward pass between boundaries of layers.
        chains: The Sequentials of the model, and the other modules that can be recomputed as a whole.
        rows: For each chain in `chains`, its groups of consecutive layers that may all run twice.
        spans: The spans (ranges of units) that may run twice, each with the index of its chain and the range of layers.
        left_out: For each layer (by name) that may not run twice, the reason.
    """

    spans: dict[Span, tuple[int, Range]]
    left_out: dict[str, str]
    chains: Sequence[Chain]
    rows: list[list[list[Layer]]]
    step: StepUnits

    @staticmethod
    def of(step: StepUnits, chains: Sequence[Chain]) -> StepParts:
        """Return the parts of a step that may run twice. If a layer is called twice, only its first call counts."""
        own = {chain.name for chain in chains if chain.is_module}  # a layer that FSDP 2 shards is a module of its own
        parts = StepParts({}, {}, chains, [], step)
        for index, chain in enumerate(chains):
            changed = {at: why for (of, at), why in step.changed.items() if of == index}
            # Of modules, only what running showed: that a module may not run twice leaves those inside of it.
            known = changed if chain.is_module else chain.outside | changed
            names = {at: name for at, name in enumerate(chain.layers) if chain.is_module or name not in own}
            parts.left_out.update({name: known[at] for at, name in names.items() if at in known})
            parts.rows.append(list(_rows(step, index, chain, {*chain.outside, *changed})))
            for row in parts.rows[-1]:
                size = math.ceil(len(row) / _MOST_PLACES)
                groups = [(row[first], row[first : first + size][-1]) for first in range(0, len(row), size)]
                for (first, _), (_, last) in itertools.combinations_with_replacement(groups, 2):
                    (at, (start, _)), (end, (_, stop)) = first, last
                    if step.units[start].may_start:
                        parts.spans.setdefault((start, stop), (index, Range(at, end + 1)))
        return parts

    def chunks(self, segments: int) -> tuple[ChainPlan, ...]:
        """Cut each outermost Sequential into `segments` equal chunks. Return plans to recompute all but the last chunk.

        As in `torch.utils.checkpoint.checkpoint_sequential`, the last chunk runs as usual, since backward would
        recompute it at once. Layers that may not run twice are left out.
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
        """Return the plans that recompute these spans of units, one plan for each Sequential or module concerned."""
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


class _Choice(NamedTuple):
    """One way to run a span of units of a step: keep their activations, or run the units again in backward.

    Attributes:
        stop: The index after the last unit of the span.
        is_again: True if the units run again in backward.
        kept: The memory kept from forward until backward, in slots (fixed fractions of the memory limit).
        peak: The memory needed while the units run, in slots.
        cost: The number of extra operations.
    """

    stop: int
    is_again: bool
    kept: int
    peak: int
    cost: float


class LeastRecomputation:
    """Finds the layers to recompute with the fewest extra operations, for any limit on a step's memory.

    If several units keep the same block of memory, it is counted for the last of them only.

    Args:
        parts: The parts of the step that may run twice.
        limit_bytes: The largest memory limit to solve for.
    """

    def __init__(self, parts: StepParts, limit_bytes: int) -> None:
        self._parts, self._units = parts, parts.step.units
        self._slot = limit_bytes / _SLOTS
        self._range = _RANGE * sum(unit.operations for unit in self._units)
        numbered = [*enumerate(self._units)]
        self._handed = {key: at for at, unit in reversed(numbered) for key in unit.input}
        self._last = {key: at for at, unit in numbered for key in unit.saved}
        owned = [sum(size for key, size in unit.saved.items() if self._last[key] == at) for at, unit in numbered]
        self._kept_before = [0, *itertools.accumulate(owned)]
        first = {key: at for at, unit in reversed(numbered) for key in unit.saved}
        new = [sum(size for key, size in unit.saved.items() if first[key] == at) for at, unit in numbered]
        self._held = [*itertools.accumulate(new)]  # while the backward pass of a unit runs
        stops: dict[int, set[int]] = {}
        for start, stop in parts.spans:
            stops.setdefault(start, set()).add(stop)
        self._choices = [
            [self._keeping(at), *self._running_again(at, stops.get(at, set()))] for at in range(len(self._units))
        ]
        # The least extra operations for the units from here on, by the slots of memory that are left.
        self._table = np.full((len(self._units) + 1, _SLOTS + 1), _INFINITE)
        self._table[-1] = 0.0
        for at in range(len(self._units) - 1, -1, -1):
            self._table[at] = np.min([self._costs(choice) for choice in self._choices[at]], axis=0)

    def frontier(self) -> list[tuple[int, int]]:
        """Return the Pareto front of memory and recomputation: (peak bytes, extra operations), highest peak first."""
        costs = self._table[0]
        return [
            (int(slot * self._slot) + 1, int(costs[slot]))
            for slot in range(_SLOTS, -1, -1)
            if costs[slot] < _INFINITE and (slot == 0 or costs[slot - 1] > costs[slot])
        ]

    def best(self, limit_bytes: float) -> tuple[ChainPlan, ...] | None:
        """Return the plans with the least recomputation whose peak is within a limit; None if there are none."""
        left, at = min(int(limit_bytes / self._slot), _SLOTS), 0
        if left < 0 or self._table[0, left] == _INFINITE:
            return None
        spans: list[Span] = []
        while at < len(self._units):
            choice = min(self._choices[at], key=lambda choice: self._costs(choice)[left])
            spans += [(at, choice.stop)] if choice.is_again else []
            at, left = choice.stop, left - choice.kept
        return self._parts.plans(spans)

    def _costs(self, choice: _Choice) -> np.ndarray:
        """Return, for each amount of free memory, the fewest extra operations for this choice and all later units."""
        costs = np.full(_SLOTS + 1, _INFINITE)
        first = max(choice.kept, choice.peak)
        if first <= _SLOTS:
            costs[first:] = self._table[choice.stop, first - choice.kept : _SLOTS + 1 - choice.kept] + choice.cost
        return costs

    def _keeping(self, at: int) -> _Choice:
        unit, before = self._units[at], self._kept_before
        # Differences of rounded sums: many small units would all be rounded to nothing.
        kept = round(before[at + 1] / self._slot) - round(before[at] / self._slot)
        peak = max(unit.forward_peak, unit.backward_peak) - before[at]
        return _Choice(at + 1, is_again=False, kept=kept, peak=round(peak / self._slot), cost=0.0)

    def _running_again(self, start: int, stops: set[int]) -> Iterator[_Choice]:
        """For each index in `stops`, yield the choice to recompute the units from `start` up to that index."""
        entry = self._units[start].forward_peak - self._kept_before[start]
        given = self._units[start].input
        seen = {*given}
        first = forward = backward = kept = operations = again = 0
        for at in range(start, max(stops, default=0)):
            unit = self._units[at]
            # While it runs for the first time, without keeping anything.
            first = max(first, unit.forward_peak - self._kept_before[at] if at > start else 0)
            # While it runs again, and in its backward pass.
            handed_on = sum(size for key, size in unit.input.items() if key not in seen)
            forward = max(forward, kept + handed_on + unit.forward_peak - unit.allocated_before)
            kept += sum(size for key, size in unit.saved.items() if key not in seen)
            seen |= unit.saved.keys()
            backward = max(backward, kept + unit.backward_peak - self._held[at])
            again = again if unit.again is None else operations + unit.again
            operations += unit.operations
            if at + 1 in stops:
                # What was handed to an earlier unit too is there anyway, unless it is kept by a unit of this span only.
                counted = (key for key in given if self._handed[key] == start or start <= self._last.get(key, -1) <= at)
                n_given = sum(given[key] for key in counted)
                begin = 0 if unit.backward_before is None else unit.backward_before - self._held[at]
                peak = max(entry, n_given + max(first, backward, forward + begin))
                slots = round(n_given / self._slot), round(peak / self._slot)
                yield _Choice(at + 1, is_again=True, kept=slots[0], peak=slots[1], cost=again + self._range)
