"""A checkpoint plan as data and as a table, and the way from a profile's units to a model's chains."""

from __future__ import annotations

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
    estimate,
    kept_by_chain,
    runs_again,
)
from lightning_memtools.checkpointing.step_profile import StepProfile
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.notebooks import shown_as
from lightning_memtools.reporting.tables import Table, markdown_table
from lightning_memtools.simulation.step_trace import StepCost

_HEADS = ("module", "layers", "recomputed", "left out", "kept before", "kept after", "extra")
_MOST_RANGES = 12


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The layers of a model to recompute, and the memory that one training step is predicted to need, simulated.

    Attributes:
        chains: What is recomputed of each chain.
        plain: The memory and operations of the step without the plan; None if there is nothing to plan.
        planned: The same with the plan.
        refused: Why nothing is recomputed; None if something is.
    """

    chains: tuple[ChainPlan, ...]
    plain: StepCost | None
    planned: StepCost | None
    refused: str | None = None

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
        return AppliedPlan(module, self.chains, prove=True)

    def rows(self) -> Table:
        """Returns one row per chain: what is recomputed, what is left out and why, what it keeps and what it costs."""
        operations = self.plain.operations if self.plain is not None and self.plain.operations else 1
        return Table(
            _HEADS,
            [
                (
                    chain.name or "(the model)",
                    str(len(chain.layers)),
                    _recomputed(chain),
                    _left_out(chain),
                    format_size(chain.plain_kept_bytes),
                    format_size(chain.kept_bytes),
                    f"{chain.extra_operations / operations:.1%}",
                )
                for chain in self.chains
            ],
            align="lrllrrr",
        )

    def figures(self, measured_bytes: int | None = None) -> list[str]:
        """Returns a line each on what the plan saves and costs, the last one on the measured peak if it is given."""
        if self.plain is None or self.planned is None:
            return []
        plain, planned = self.plain, self.planned
        before, after = format_size(plain.activation_bytes), format_size(planned.activation_bytes)
        peak_before, peak_after = format_size(plain.peak_bytes), format_size(planned.peak_bytes)
        lines = [
            f"activation memory: {before} before, {after} after",
            f"extra computation: {self.extra_operations:.1%}",
            f"predicted peak (simulated): {peak_before} before, {peak_after} after",
        ]
        if measured_bytes is not None:
            off = measured_bytes / planned.peak_bytes - 1
            lines.append(f"measured peak: {format_size(measured_bytes)} ({off:+.1%} of the predicted one)")
        return lines

    def table(self, measured_bytes: int | None = None) -> str:
        """Returns the plan in markdown: a row per chain, then the figures."""
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
    """Returns the units of a profile with what the chains leave out pinned, and what a pattern named recomputed."""
    units = []
    for place, profiled in zip(profile.places, profile.units, strict=True):
        unit = profiled
        if place is not None:
            chain = chains[place[0]]
            unit = replace(unit, pinned=unit.pinned or place[1] in chain.outside)
            if chain.forced and not unit.pinned:
                unit = as_forced(unit)
        units.append(unit)
    return units


def chain_plans(
    profile: StepProfile, chains: Sequence[Chain], ranges: Ranges, *, forced: bool = True
) -> list[ChainPlan]:
    """Returns ranges of units as ranges of each chain's layers. A chain that is called twice goes by its first call."""
    of_chain: dict[int, list[Range]] = {}
    offsets: dict[int, int] = {}
    for at, place in enumerate(profile.places):
        if place is not None:
            offsets.setdefault(place[0], at)
    for one in ranges:
        place = profile.places[one.start]
        assert place is not None
        first = offsets[place[0]]
        if one.stop - first <= len(chains[place[0]].layers):
            of_chain.setdefault(place[0], []).append(_moved(one, first))
    plans = []
    for index, chain in enumerate(chains):
        outside = chain.outside | {at: why for (of, at), why in profile.outside.items() if of == index}
        taken = tuple(of_chain.get(index, ()))
        if chain.forced:
            taken = (Range(0, 1),) if forced and not outside and index in offsets else ()
        plans.append(ChainPlan(chain.name, chain.layers, taken, outside, chain.forced))
    return plans


def with_figures(plans: Sequence[ChainPlan], profile: StepProfile, units: Sequence[Unit]) -> list[ChainPlan]:
    """Returns the plans with what each chain keeps and computes again. `units` are those of `units_under`."""
    before = kept_by_chain(profile.units, ())
    ranges = [
        _moved(one, -at)
        for at, place in enumerate(profile.places)
        if place is not None and place[1] == 0 and not plans[place[0]].forced
        for one in plans[place[0]].ranges
    ]
    after = kept_by_chain(units, tuple(ranges))
    found = []
    for index, plan in enumerate(plans):
        if not plan.ranges:
            extra, kept = 0, before[index]
        elif plan.forced:
            mine = [unit for unit in profile.units if unit.chain == index]
            extra, kept = sum(unit.operations - unit.tail_operations for unit in mine), after[index]
        else:
            own = tuple(one for one in ranges if units[one.start].chain == index)
            extra, kept = estimate(units, own).extra_operations, after[index]
        found.append(replace(plan, plain_kept_bytes=before[index], kept_bytes=kept, extra_operations=extra))
    return found


def _moved(one: Range, by: int) -> Range:
    return Range(one.start - by, one.stop - by, tuple(_moved(inner, by) for inner in one.inner))


def _recomputed(chain: ChainPlan) -> str:
    if not chain.ranges:
        return "nothing"
    times = list(runs_again(chain.ranges))
    counts = f"{_counted(len(set(times)), 'layer')}, {_counted(len(times), 'run')}"
    return f"{_listed([str(one) for one in chain.ranges])} ({counts})"


def _left_out(chain: ChainPlan) -> str:
    reasons: dict[str, list[str]] = {}
    for at, why in chain.outside.items():
        reasons.setdefault(why, []).append(str(at))
    return "; ".join(f"{_listed(found)}: {why}" for why, found in reasons.items()) or "none"


def _listed(found: Sequence[str]) -> str:
    shown = ", ".join(found[:_MOST_RANGES])
    return shown if len(found) <= _MOST_RANGES else f"{shown} and {len(found) - _MOST_RANGES} more"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
