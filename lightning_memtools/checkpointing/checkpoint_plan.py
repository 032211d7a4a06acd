"""A checkpoint plan as data and as a table, and the way from a profile's units to a model's chains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import Chain
from lightning_memtools.checkpointing.memory_model import (
    ChainPlan,
    Range,
    Ranges,
    Unit,
    as_forced,
    boundaries,
    estimate,
    kept_by_unit,
    runs_again,
)
from lightning_memtools.checkpointing.step_profile import StepProfile
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted, first_of
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as
from lightning_memtools.simulation.step_trace import StepCost

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a module in a list
_HEADS = ("module", "layers", "recomputed", "left out", "kept before", "kept after", "extra")
_MOST_RANGES = 12
_MOST_OF_FORWARD = 0.5
_LEAST_KEPT = 0.001


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The layers of a model to recompute, and the memory that one training step is predicted to need, simulated.

    Attributes:
        chains: What is recomputed of each chain.
        plain: The memory and operations of the step without the plan; None if there is nothing to plan.
        planned: The same with the plan.
        refused: Why nothing is recomputed; None if something is.
        notes: What else changes with the plan, in words.
        heads: The linear layers whose cross-entropy is computed in chunks.
        host_bytes: The bytes that layers keep in host memory, by the memory model.
        relative_time: The time of forward and backward as a multiple of the plain step's, by the time model of
            `offload`; None without it.
    """

    chains: tuple[ChainPlan, ...]
    plain: StepCost | None
    planned: StepCost | None
    refused: str | None = None
    notes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    host_bytes: int = 0
    relative_time: float | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak of allocated memory with the plan, in bytes."""
        return None if self.planned is None else self.planned.peak_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """The predicted peak of allocated memory without the plan, in bytes."""
        return None if self.plain is None else self.plain.peak_bytes

    @property
    def extra_operations(self) -> float:
        """The additional operations of a step, as a share of the plain step's: 0.25 is a quarter more."""
        if self.plain is None or self.planned is None or self.plain.operations == 0:
            return 0.0
        return self.planned.operations / self.plain.operations - 1

    def apply(self, module: nn.Module) -> AppliedPlan:
        """Apply the plan to the module that it was made for, or to one built the same.

        Returns a handle: `remove()` undoes the plan, and so does leaving it as a context manager. At its first call
        every range runs two more times, to prove that it repeats itself bit for bit.
        """
        return AppliedPlan(module, self.chains, heads=self.heads, prove=True)

    def rows(self) -> Table:
        """Return a row per chain and per kind of module: what is recomputed or left out and why, bytes and cost."""
        operations = self.plain.operations if self.plain is not None and self.plain.operations else 1
        return Table(
            _HEADS,
            [
                (
                    f"{key[0]} ({len(chains)} modules)" if len(chains) > 1 else chains[0].name or key[0],
                    *key[1:],
                    format_size(sum(chain.plain_kept_bytes for chain in chains)),
                    format_size(sum(chain.kept_bytes for chain in chains)),
                    f"{sum(chain.extra_operations for chain in chains) / operations:.1%}",
                )
                for key, chains in self._alike().items()
            ],
            align="lrllrrr",
        )

    def recomputed(self) -> str:
        """Return in a few words which modules are recomputed, those that take most of the operations first."""
        found = [
            (
                sum(one.extra_operations for one in chains),
                f"{len(chains)} x {key[0]}" if len(chains) > 1 else chains[0].name or key[0],
            )
            for key, chains in self._alike().items()
            if chains[0].is_applied
        ]
        return first_of([name for _, name in sorted(found, reverse=True)]) or "nothing"

    def _alike(self) -> dict[tuple[str, ...], list[ChainPlan]]:
        """Return the chains that are treated alike, by the first columns of their row."""
        found: dict[tuple[str, ...], list[ChainPlan]] = {}
        for chain in self.chains:
            name = _NUMBER.sub("*", chain.name) if chain.is_module else chain.name or "(the model)"
            key = name, str(len(chain.layers)), _recomputed(chain), _left_out(chain)
            found.setdefault(key, []).append(chain)
        return found

    def figures(self, measured_bytes: int | None = None) -> list[str]:
        """Return a line each on what the plan saves and costs, the last one on the measured peak if it is given."""
        if self.plain is None or self.planned is None:
            return []
        plain, planned = self.plain, self.planned
        before, after = format_size(plain.activation_bytes), format_size(planned.activation_bytes)
        peak_before, peak_after = format_size(plain.peak_bytes), format_size(planned.peak_bytes)
        lines = [
            f"activation memory: {before} before, {after} after",
            f"extra computation: {self.extra_operations:.1%}",
            *self.notes,
            f"predicted peak (simulated): {peak_before} before, {peak_after} after",
        ]
        if measured_bytes is not None:
            off = measured_bytes / planned.peak_bytes - 1
            lines.append(f"measured peak: {format_size(measured_bytes)} ({off:+.1%} from the predicted one)")
        return lines

    def table(self, measured_bytes: int | None = None) -> str:
        """Return the plan in markdown: a row per chain, then the figures."""
        parts = ["# Gradient checkpointing"]
        if self.refused is not None:
            parts.append(f"Nothing is recomputed. {self.refused}")
        if self.chains:
            parts.append(markdown_table(self.rows()))
        if self.plain is not None:
            parts.append("\n".join(f"- {line}" for line in self.figures(measured_bytes)))
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        return self.table()

    _repr_html_ = shown_as(__str__)


def units_under(profile: StepProfile, chains: Sequence[Chain]) -> list[Unit]:
    """Return the units of a profile with what the chains leave out pinned, and what a pattern named recomputed."""
    units = []
    for place, profiled, before in zip(profile.places, profile.units, boundaries(profile.units)[:-1], strict=True):
        unit = profiled
        if place is not None:
            chain = chains[place[0]]
            unit = replace(unit, pinned=unit.pinned or place[1] in chain.outside)
            if chain.forced and not unit.pinned:
                unit = as_forced(unit, before)
        units.append(unit)
    return units


def rows_of(profile: StepProfile, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
    """Return for each chain the places in the row of units where ranges of its layers may begin and end."""
    kept = kept_by_unit(profile.units, ())
    forward = sum(unit.operations for unit in profile.units)
    found: list[tuple[int, ...]] = []
    for index, chain in enumerate(chains):
        if chain.forced:
            continue
        row: list[int] = []
        for at in range(len(chain.layers)):
            span = profile.spans.get((index, at))
            may = at not in chain.outside and (index, at) not in profile.outside and span is not None
            if row and (not may or span is None or span[0] != row[-1]):
                found.append(tuple(row))
                row = []
            if may and span is not None:
                row = [*(row or [span[0]]), span[1]]
        found.append(tuple(row))
        if chain.is_module and row:
            units = profile.units[row[0] : row[-1]]
            # Running most of a model again gains little, and running a module again that keeps little gains nothing.
            # Its input is kept in any case.
            gain = sum(kept[row[0] : row[-1]]) - min(kept[row[0]], units[0].in_kept)
            gains = gain > _LEAST_KEPT * profile.plain.activation_bytes
            if not gains or sum(unit.operations for unit in units) > _MOST_OF_FORWARD * forward:
                found.pop()
    return sorted({row for row in found if len(row) > 1})


def chain_plans(
    profile: StepProfile, chains: Sequence[Chain], ranges: Ranges, *, forced: bool = True
) -> list[ChainPlan]:
    """Return ranges of units as ranges of each chain's layers. A chain that is called twice goes by its first call."""
    begins: dict[int, list[tuple[int, int]]] = {}
    for (index, at), (start, _) in profile.spans.items():
        begins.setdefault(start, []).append((index, at))
    ends = {(index, stop): at + 1 for (index, at), (_, stop) in profile.spans.items()}
    of_chain: dict[int, list[Range]] = {}

    def place(one: Range, within: int | None) -> Range | None:
        """Return a range in the layers of the chain `within` if it is of that one; else notes it with its own."""
        found = [each for each in begins.get(one.start, ()) if ends.get((each[0], one.stop), 0) > each[1]]
        if not found:  # of a chain's second call
            return None
        # Of several chains the innermost, whose name is longest.
        index, at = max(found, key=lambda each: (len(chains[each[0]].name), each[1]))
        inner = [moved for each in one.inner if (moved := place(each, index)) is not None]
        moved = Range(at, ends[index, one.stop], tuple(inner), one.kept)
        if index == within:
            return moved
        of_chain.setdefault(index, []).append(moved)
        return None

    for one in ranges:
        place(one, None)
    plans = []
    for index, chain in enumerate(chains):
        outside = chain.outside | {at: why for (of, at), why in profile.outside.items() if of == index}
        taken = tuple(sorted(of_chain.get(index, ()), key=lambda one: one.start))
        if chain.forced:
            taken = (Range(0, 1),) if forced and not outside and (index, 0) in profile.spans else ()
        plans.append(ChainPlan(chain.name, chain.layers, taken, outside, chain.is_module))
    return plans


def with_figures(
    plans: Sequence[ChainPlan], chains: Sequence[Chain], profile: StepProfile, units: Sequence[Unit], ranges: Ranges
) -> list[ChainPlan]:
    """Return the plans with what each chain keeps and computes again. `units` are those of `units_under`."""
    before, after = kept_by_unit(profile.units, ()), kept_by_unit(units, ranges)
    inside: dict[int, set[int]] = {}
    for (index, _), span in profile.spans.items():
        inside.setdefault(index, set()).update(range(*span))
    found = []
    for index, plan in enumerate(plans):
        mine = inside.get(index, set())
        if not plan.ranges:
            extra = 0
        elif chains[index].forced:
            extra = sum(units[at].operations - units[at].tail_operations for at in mine)
        else:
            own = tuple(one for one in ranges if {one.start, one.stop - 1} <= mine)
            extra = sum(estimate(units, (one,), one.start, one.stop).extra_operations for one in own)
        kept_before, kept_after = (sum(kept[at] for at in mine) for kept in (before, after))
        found.append(replace(plan, plain_kept_bytes=kept_before, kept_bytes=kept_after, extra_operations=extra))
    return found


def _recomputed(chain: ChainPlan) -> str:
    parts = [] if chain.ranges or chain.offloaded else ["nothing"]
    if chain.ranges and chain.is_module:
        kept = len(chain.ranges[0].kept)
        parts.append(f"all of it but for {counted(kept, 'product', 'products')}" if kept else "all of it")
    elif chain.ranges:
        times = list(runs_again(chain.ranges))
        counts = f"{counted(len(set(times)), 'layer', 'layers')}, {counted(len(times), 'run', 'runs')}"
        parts.append(f"{first_of(chain.ranges, _MOST_RANGES)} ({counts})")
    if chain.offloaded:
        which = "what it keeps" if chain.is_module else first_of(chain.offloaded, _MOST_RANGES)
        parts.append(f"{which} in host memory")
    return "; ".join(parts)


def _left_out(chain: ChainPlan) -> str:
    reasons: dict[str, list[str]] = {}
    for at, why in chain.outside.items():
        reasons.setdefault(why, []).append(str(at))
    return "; ".join(f"{first_of(found, _MOST_RANGES)}: {why}" for why, found in reasons.items()) or "none"
