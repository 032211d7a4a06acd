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

    `backward_peaks`: as they are, and as if its input stayed; `again_...`: where saved tensors are freed once they are
    used.
    `taken`: its input, and that of the layers around it that begin with it.
    """

    place: Place | None
    allocated_before: int = 0
    peak: int = 0
    dropping: int | None = None
    operations: int = 0
    operations_before: int = 0
    operations_at_last_save: int = 0
    saves: bool = False
    saved: dict[int, int] = field(default_factory=dict)
    input: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    output: dict[int, int] = field(default_factory=dict)
    overwrites: bool = False
    given: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    products: list[ProductRecord] = field(default_factory=list)
    backward_before: int | None = None
    backward_peaks: tuple[int, int] | None = None
    again_backward_peaks: tuple[int, int] | None = None


def units_of(records: Sequence[UnitRecord], pinned: Collection[Place]) -> tuple[Unit, ...]:
    """Return the units that were measured; those between chains and at the places `pinned` must not run again.

    A block counts as kept by the first unit that keeps it.
    """
    may_start = _may_start(records)
    units: list[Unit] = []
    seen: set[int] = set()
    before: dict[int, int] = {}
    kept, held = 0, True
    for at, (record, after) in enumerate(zip(records, [*records[1:], None], strict=True)):
        # Where the next unit takes something else, as each of three projections takes the same tensor, it is that.
        passed = record.output if after is None or after.taken.keys() & record.output.keys() else after.taken
        new = record.saved.keys() - seen
        seen |= new
        unit = Unit(
            own_bytes=_size_of(record.saved, new - before.keys() - passed.keys()),
            in_kept=_size_of(before, record.saved),
            out_kept=_size_of(passed, new - before.keys()),
            out_held=seen.issuperset(passed),
            out_bytes=0 if passed.keys() == before.keys() else sum(passed.values()),
            same_storage=bool(passed) and passed.keys() <= before.keys(),
            may_start=may_start[at],
            pinned=record.place is None or record.place in pinned,
            chain=None if record.place is None else record.place[0],
            saves=record.saves,
            operations=record.operations - record.operations_before,
            tail_operations=record.operations - record.operations_at_last_save,
            forward_bytes=record.peak - record.allocated_before,
            dropping_bytes=record.peak - record.allocated_before if record.dropping is None else record.dropping,
            products=tuple(_product_of(one, record, passed) for one in record.products),
        )
        # Above what is kept by the model's own count, so that its estimate of the plain step is exact.
        forward_base = record.allocated_before - kept - (0 if held else sum(before.values()))
        added, held = unit.keep(input_held=held)
        kept += added
        peaks, again = record.backward_peaks, record.again_backward_peaks or record.backward_peaks
        units.append(
            replace(
                unit,
                forward_base=forward_base,
                backward_base=0 if record.backward_before is None else record.backward_before - kept,
                backward_peak=None if peaks is None else peaks[0] - kept,
                again_backward_peak=None if again is None else again[1] - kept,
                freed_input_bytes=0 if again is None else again[1] - again[0],
            )
        )
        before = passed
    return tuple(units)


def _size_of(blocks: dict[int, int], among: Collection[int]) -> int:
    """Return the size of those blocks that are among these."""
    return sum(size for key, size in blocks.items() if key in among)


def _product_of(one: ProductRecord, record: UnitRecord, passed: Collection[int]) -> Product:
    return Product(
        n_bytes=sum(one.results.values()),
        operations=one.operations,
        is_output=any(key in passed for key in one.results),
        in_tail=one.operations_after > record.operations_at_last_save,
        may_be_kept=bool(one.results) and not one.overwritten and not one.results.keys() & record.input.keys(),
    )


def _may_start(records: Sequence[UnitRecord]) -> list[bool]:
    """Return for each unit whether a range may begin with it: nobody overwrites its input, or a view of it."""
    found: list[bool] = []
    overwritten = False
    for record in reversed(records):
        is_view = bool(record.output) and record.output.keys() <= record.input.keys()
        overwritten = record.overwrites or (is_view and overwritten)
        found.append(not overwritten)
    return found[::-1]
