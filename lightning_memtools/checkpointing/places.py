"""From a profile's units to a model's chains, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_memtools.checkpointing.find import Chain
from lightning_memtools.checkpointing.profiling import Profile
from lightning_memtools.checkpointing.ranges import ChainPlan, Range, Ranges
from lightning_memtools.checkpointing.units import Unit, as_forced, estimate, kept_by_chain


def with_forced(measured: Profile, chains: Sequence[Chain]) -> list[Unit]:
    """The units, where a module that a pattern named is recomputed in any case."""
    return [
        as_forced(unit) if place is not None and chains[place[0]].forced and not unit.pinned else unit
        for unit, place in zip(measured.units, measured.places, strict=True)
    ]


def chain_plans(measured: Profile, chains: Sequence[Chain], ranges: Ranges, *, forced: bool = True) -> list[ChainPlan]:
    """Ranges of units as ranges of each chain's layers. A chain that is called twice goes by its first call."""
    of_chain: dict[int, list[Range]] = {}
    offsets: dict[int, int] = {}
    for at, place in enumerate(measured.places):
        if place is not None:
            offsets.setdefault(place[0], at)
    for one in ranges:
        place = measured.places[one.start]
        assert place is not None
        first = offsets[place[0]]
        if one.stop - first <= len(chains[place[0]].layers):
            of_chain.setdefault(place[0], []).append(_moved(one, first))
    plans = []
    for index, chain in enumerate(chains):
        outside = chain.outside | {at: why for (of, at), why in measured.outside.items() if of == index}
        taken = tuple(of_chain.get(index, ()))
        if chain.forced:
            taken = (Range(0, 1),) if forced and not outside and index in offsets else ()
        plans.append(ChainPlan(chain.name, chain.layers, taken, outside, chain.forced))
    return plans


def with_figures(plans: Sequence[ChainPlan], measured: Profile, units: Sequence[Unit]) -> list[ChainPlan]:
    """The plans with what each chain keeps and computes again; `units` are those of forced chains as these run."""
    before = kept_by_chain(measured.units, ())
    ranges = [
        _moved(one, -at)
        for at, place in enumerate(measured.places)
        if place is not None and place[1] == 0 and not plans[place[0]].forced
        for one in plans[place[0]].ranges
    ]
    after = kept_by_chain(units, tuple(ranges))
    found = []
    for index, plan in enumerate(plans):
        if not plan.ranges:
            extra, kept = 0, before[index]
        elif plan.forced:
            mine = [old for old in measured.units if old.chain == index]
            extra, kept = sum(unit.operations - unit.tail_operations for unit in mine), after[index]
        else:
            own = tuple(one for one in ranges if units[one.start].chain == index)
            extra, kept = estimate(units, own).extra_operations, after[index]
        found.append(replace(plan, plain_kept_bytes=before[index], kept_bytes=kept, extra_operations=extra))
    return found


def _moved(one: Range, by: int) -> Range:
    return Range(one.start - by, one.stop - by, tuple(_moved(inner, by) for inner in one.inner))
