"""The parts of a step that may run twice: layers in a row of a Sequential, and modules, as spans of units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_memtools.checkpointing.apply_plan import ChainPlan, Range
from lightning_memtools.checkpointing.chains import Chain, outermost
from lightning_memtools.checkpointing.least_recomputation import Span, boundaries
from lightning_memtools.checkpointing.step_units import StepUnits, Unit

_MOST_PLACES = 100  # in a Sequential where ranges begin and end
_MOST_OF_FORWARD = 0.5  # of the operations: running more than this again as a whole gains little

Layer = tuple[int, Span]
"""The index of a layer in its chain, and its units."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a step that may run twice.

    Attributes:
        spans: Spans of units, each with the index of its chain and its layers.
        forced: Those of them that have to.
        left_out: Why layers may not run twice, by name.
        chains: The chains.
        rows: For each chain, layers that run one after the other and may all run twice.
        units: The units of the step.
    """

    spans: dict[Span, tuple[int, Range]]
    forced: list[Span]
    left_out: dict[str, str]
    chains: Sequence[Chain]
    rows: list[list[list[Layer]]]
    units: Sequence[Unit]

    @staticmethod
    def of(step: StepUnits, chains: Sequence[Chain]) -> StepParts:
        """Return the parts of a step; a chain that is called twice goes by its first call."""
        work = [0, *itertools.accumulate(unit.operations for unit in step.units)]
        own = {chain.name for chain in chains if chain.is_module}  # a layer that FSDP 2 shards is a module of its own
        parts = StepParts({}, [], {}, chains, [], step.units)
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
                if chain.forced:
                    parts.forced.append(row[0][1])
        return parts

    def chunks(self, segments: int) -> tuple[ChainPlan, ...]:
        """Return the outermost Sequentials in equal chunks, the last of each left out, as far as they may run twice.

        As in `torch.utils.checkpoint.checkpoint_sequential`, the last chunk runs as usual: it would be recomputed at
        once.
        """
        return tuple(
            ChainPlan(chain.name, chain.layers, ranges)
            for chain in outermost(self.chains)
            if (ranges := tuple(self._chunks(chain, segments)))
        )

    def plans(self, spans: Sequence[Span]) -> tuple[ChainPlan, ...]:
        """Return spans of units as ranges of each chain's layers."""
        ranges: dict[int, list[Range]] = {}
        for span in spans:
            index, one = self.spans[span]
            ranges.setdefault(index, []).append(one)
        chains = ((self.chains[index], sorted(found)) for index, found in sorted(ranges.items()))
        return tuple(ChainPlan(one.name, one.layers, tuple(found), one.is_module) for one, found in chains)

    def _chunks(self, chain: Chain, segments: int) -> Iterator[Range]:
        length = max(len(chain.layers) // segments, 1)
        for row in self.rows[self.chains.index(chain)]:
            for number in range(min(segments, len(chain.layers)) - 1):
                chunk = [(at, start) for at, (start, _) in row if at // length == number]
                first = next((at for at, start in chunk if self.units[start].may_start), None)
                if first is not None:
                    yield Range(first, chunk[-1][0] + 1)


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
    """Return with which layers ranges may begin and end, and at which units: of many some where little is passed on."""
    begins, ends = [(at, start) for at, (start, _) in row], [(at, stop) for at, (_, stop) in row]
    if len(row) > _MOST_PLACES:
        between = boundaries(units)
        size = math.ceil((len(row) - 1) / _MOST_PLACES)
        groups = (range(first, min(first + size, len(row))) for first in range(1, len(row), size))
        chosen = [min(group, key=lambda at: between[begins[at][1]]) for group in groups]
        ends = [ends[at] for at in (*(at - 1 for at in chosen), len(row) - 1)]
        begins = [begins[at] for at in (0, *chosen)]
    return begins, ends
