"""Records the measurements of the units of a step, and makes the units of the memory model from them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from lightning_memtools.checkpointing.memory_model import Product, Unit

Place = tuple[int, int]
"""The indices of a chain and of a layer in it."""


@dataclass(slots=True)
class ProductRecord:
    """A product of a unit: its operations, those counted until it was done, its results' blocks, and their fate."""

    operations: int
    operations_after: int
    results: dict[int, int]
    overwritten: bool = False


@dataclass(slots=True)
class UnitRecord:
    """The measurements of one unit. Blocks are by id, with their sizes; a `place` of None is code between chains.

    `alongside`: the blocks besides its input that are there when it begins and that no unit has kept by then: which
    unit made each, and its size. `alongside_if_dropped`: the same if nothing is kept. `taken`: its input, and that of
    the layers around it that begin with it. `within`: the calls of these layers, and of others around it.
    `casts`: copies of weights and of the batch in another type; autocast keeps those of weights.
    `again_backward_peaks`: of its backward pass after it ran again, where others hold its input, and where not.
    """

    place: Place | None
    allocated_before: int = 0
    peak: int = 0
    operations: int = 0
    operations_before: int = 0
    operations_at_last_save: int = 0
    peak_at_last_save: int = 0
    dropping: int | None = None
    alongside: tuple[tuple[int, int], ...] = ()
    alongside_if_dropped: tuple[tuple[int, int], ...] = ()
    saves: bool = False
    saved: dict[int, int] = field(default_factory=dict)
    input: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    within: tuple[int, ...] = ()
    output: dict[int, int] = field(default_factory=dict)
    overwrites: bool = False
    given: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    products: list[ProductRecord] = field(default_factory=list)
    casts: dict[int, int] = field(default_factory=dict)
    backward_before: int | None = None
    backward_peak: int | None = None
    again_backward_peaks: tuple[int, int] = (0, 0)


def units_of(
    records: Sequence[UnitRecord], pinned: Collection[Place], carried: dict[int, int], starts: Sequence[int]
) -> tuple[Unit, ...]:
    """Returns the units that were measured; those between chains and at the places `pinned` must not run again.

    The blocks that are `carried` from layer to layer, with their sizes, count as kept by the first unit: whatever a
    plan does, a layer that keeps them or the input of a range is there soon after they were made. `starts` are for each
    unit the first that may run again together with it.
    """
    units: list[Unit] = []
    keepers = _keepers(records)
    kept_before = set(carried)
    before: dict[int, int] = {}
    kept, not_yet_kept = 0, dict(carried)
    # What a chain's first unit keeps of its input is there until the layers around the chain end, whatever a plan does.
    lasting: dict[int, tuple[int, ...]] = {}
    there_at_last = set(records[-2].alongside_if_dropped) if len(records) > 1 else set()
    for at, (record, after) in enumerate(zip(records, [*records[1:], None], strict=True)):
        keeps = {key for key in record.saved if keepers[key] <= at}
        new = keeps - kept_before
        not_kept = sum(before.values()) - _size_of(before, kept_before)
        kept_before |= new
        passed = _passed_on(record, after, kept_before)
        if at and _lies_between(records[at - 1], record):
            lasting |= dict.fromkeys(keeps & before.keys(), record.within)
        now = () if after is None else after.within
        passed = {
            key: size
            for key, size in passed.items()
            if key not in carried and (key in before or key not in lasting or now[: len(lasting[key])] != lasting[key])
        }
        same = bool(passed) and passed.keys() <= before.keys()
        own = {key: record.saved[key] for key in new if key not in before and key not in passed}
        unit = Unit(
            own_bytes=sum(own.values()) + (0 if at else sum(carried.values())),
            out_bytes=0 if passed.keys() == before.keys() else sum(passed.values()),
            in_kept=_size_of(before, keeps),
            in_added=_size_of(before, new),
            out_kept=_size_of(passed, new - before.keys()),
            out_held=_size_of(passed, kept_before),
            same_storage=same,
            pinned=record.place is None or record.place in pinned,
            chain=None if record.place is None else record.place[0],
            saves=record.saves,
            operations=record.operations - record.operations_before,
            tail_operations=record.operations - record.operations_at_last_save,
            forward_bytes=record.peak - record.allocated_before,
            stopped_bytes=max(record.peak_at_last_save - record.allocated_before, 0),
            dropping_bytes=record.peak - record.allocated_before if record.dropping is None else record.dropping,
            alongside=record.alongside_if_dropped,
            cached_bytes=sum(own[key] for key in own.keys() & record.casts if (at, own[key]) in there_at_last),
            again_bytes=sum(size for maker, size in record.alongside if maker >= starts[at]),
            products=tuple(_product_of(one, record, passed) for one in record.products),
        )
        forward_base = record.allocated_before - kept - not_kept
        kept += sum(record.saved[key] for key in new) + (0 if at else sum(carried.values()))
        not_yet_kept = {key: size for key, size in not_yet_kept.items() if key not in record.saved}
        kept_then = kept - sum(not_yet_kept.values())
        units.append(
            replace(
                unit,
                forward_base=forward_base,
                backward_base=0 if record.backward_before is None else record.backward_before - kept_then,
                backward_peak=None if record.backward_peak is None else record.backward_peak - kept_then,
                again_backward_peak=None
                if record.backward_peak is None
                else record.again_backward_peaks[0] - kept_then,
                freed_input_bytes=record.again_backward_peaks[0] - record.again_backward_peaks[1],
            )
        )
        before = passed
    return tuple(_with_starts(units, records))


def _keepers(records: Sequence[UnitRecord]) -> dict[int, int]:
    """Returns for each block that is kept the unit that it counts for: the first that keeps it.

    A unit's output that a later one keeps, but not the next one, counts for the later one, which keeps it whether the
    first runs again or not: branches side by side are so, and a gate that is computed from what it is multiplied with.
    """
    found: dict[int, int] = {}
    for at, record in enumerate(records):
        for key in record.saved:
            first = found.setdefault(key, at)
            if first < at and key in records[first].output:
                after = records[first + 1]
                if key not in after.saved.keys() & after.input.keys():
                    found[key] = at
    return found


def _passed_on(record: UnitRecord, after: UnitRecord | None, kept: Collection[int]) -> dict[int, int]:
    """Returns the blocks between a unit and the next one, by their sizes: the unit's output, if the next one takes it.

    Where it takes something else, as each of three projections takes the same tensor, these are the next unit's input.
    What of that is kept already is there in any case. A layer of several units takes its input with the first, even if
    that works on something else: a block that computes scales from a condition first.
    """
    if after is None or after.taken.keys() & record.output.keys():
        return record.output
    return {key: size for key, size in after.taken.items() if key not in kept}


def _size_of(blocks: dict[int, int], among: Collection[int]) -> int:
    """Returns the size of those blocks that are among these."""
    return sum(size for key, size in blocks.items() if key in among)


def _lies_between(record: UnitRecord, after: UnitRecord) -> bool:
    """Returns whether no range of layers crosses the place between two units, but for those around both chains."""
    return record.place is None or after.place is None or record.place[0] != after.place[0]


def _product_of(one: ProductRecord, record: UnitRecord, passed: Collection[int]) -> Product:
    return Product(
        n_bytes=sum(one.results.values()),
        operations=one.operations,
        is_output=any(key in passed for key in one.results),
        in_tail=one.operations_after > record.operations_at_last_save,
        may_be_kept=bool(one.results) and not one.overwritten and not one.results.keys() & record.input.keys(),
    )


def _with_starts(units: Sequence[Unit], records: Sequence[UnitRecord]) -> list[Unit]:
    """Returns the units; no range may begin with those whose input is overwritten, by them or through a view of it."""
    overwritten = False
    marked: list[Unit] = []
    for unit, record in zip(reversed(units), reversed(records), strict=True):
        overwritten = record.overwrites or (unit.same_storage and overwritten)
        marked.append(replace(unit, may_start=not overwritten))
    return marked[::-1]
