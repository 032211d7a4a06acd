"""A step as a row of units, ranges of them that are recomputed, and the memory that a plan is predicted to need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

_MOST_SETS = 8


@dataclass(frozen=True, slots=True)
class Range:
    """Layers `start` to `stop` (exclusive) that keep only their input in the forward pass, and run again in backward.

    Attributes:
        start: The index of the first layer in its chain.
        stop: The index after the last.
        inner: Ranges within this one. When this range runs again, they keep only their input, and run once more later.
        kept: The products whose results are kept besides the input, and not computed again; counted from the range's
            first. Such a range has no inner ones and is no inner one.
    """

    start: int
    stop: int
    inner: tuple[Range, ...] = ()
    kept: tuple[int, ...] = ()

    def __str__(self) -> str:
        span = str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        if self.kept:
            return f"{span} but for {len(self.kept)} {'product' if len(self.kept) == 1 else 'products'}"
        return f"{span}({', '.join(map(str, self.inner))})" if self.inner else span


Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The part of a plan that concerns one chain.

    Attributes:
        name: The qualified name of the Sequential, or of the module that a pattern named.
        layers: The qualified names of its layers.
        ranges: The layers that are recomputed; the others run as usual.
        offloaded: The first layers of ranges, and layers between these, whose kept tensors go to host memory.
        outside: Why layers were left out, by index.
        is_module: Whether this is one module with a forward of its own, which is its only layer.
        plain_kept_bytes: The bytes that its layers keep from forward to backward without the plan.
        kept_bytes: The same with the plan.
        extra_operations: The operations that its layers compute again in a step.
    """

    name: str
    layers: tuple[str, ...]
    ranges: Ranges
    outside: dict[int, str] = field(default_factory=dict)
    is_module: bool = False
    plain_kept_bytes: int = 0
    kept_bytes: int = 0
    extra_operations: int = 0
    offloaded: tuple[int, ...] = ()

    @property
    def is_applied(self) -> bool:
        """True if the plan changes anything in the chain."""
        return bool(self.ranges or self.offloaded)

    def unchanged(self) -> ChainPlan:
        """Return the same chain with nothing recomputed and nothing in host memory."""
        return replace(self, ranges=(), offloaded=(), kept_bytes=self.plain_kept_bytes, extra_operations=0)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, convolution or attention in a layer, whose results a range may keep when it runs again.

    Attributes:
        n_bytes: The size of its results.
        operations: Its operations.
        is_output: Whether its results are the output of the layer.
        in_tail: Whether it follows the last tensor that the layer keeps.
        may_be_kept: Whether nothing overwrites its results, and they are new tensors.
    """

    n_bytes: int
    operations: int
    is_output: bool = False
    in_tail: bool = False
    may_be_kept: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer, or the code between two chains. Sizes in bytes, each storage counted once.

    Attributes:
        own_bytes: Bytes that it keeps for backward, besides its input and its output.
        in_kept: Bytes of its input that it keeps.
        out_kept: Bytes of its output that it keeps and that are not its input's.
        out_held: Whether it or units before it keep its output, of several tensors all.
        out_bytes: The size of its output; 0 if that is its input's storage (a view, or changed in place).
        same_storage: Whether its output is its input's storage.
        may_start: Whether a recomputed range may begin with it: nothing overwrites its input.
        pinned: Whether it must stay outside of recomputed ranges.
        chain: The index of its chain; None between chains.
        saves: Whether it keeps anything for backward, parameters included.
        operations: The operations of its forward pass.
        tail_operations: Those of them that follow the last tensor that is kept: recomputation stops there.
        forward_bytes: The peak of its forward pass, above what was allocated when it began.
        dropping_bytes: The same if nothing is kept for backward.
        forward_base: What is allocated when its forward pass begins, besides what earlier units keep and its input.
        backward_base: What is allocated when its backward pass begins, besides what it and earlier units keep.
        backward_peak: The same at the peak of its backward pass; None if no gradient passes through it.
        again_backward_peak: The same where it ran again, and frees what it saved, except its input, when it is done.
        freed_input_bytes: How much lower this is where nothing else holds its input.
        products: Its matrix products, convolutions and attention, in the order of their calls.
    """

    own_bytes: int = 0
    in_kept: int = 0
    out_kept: int = 0
    out_held: bool = False
    out_bytes: int = 0
    same_storage: bool = False
    may_start: bool = True
    pinned: bool = False
    chain: int | None = None
    saves: bool = True
    operations: int = 0
    tail_operations: int = 0
    forward_bytes: int = 0
    dropping_bytes: int = 0
    forward_base: int = 0
    backward_base: int = 0
    backward_peak: int | None = None
    again_backward_peak: int | None = None
    freed_input_bytes: int = 0
    products: tuple[Product, ...] = ()

    def backward_need(self, *, again: bool, input_held: bool) -> int:
        """Return the peak of its backward pass, above what it and earlier units keep.

        Args:
            again: It is in a range that ran again.
            input_held: Others hold its input.
        """
        if not again or self.again_backward_peak is None:
            return max(self.backward_peak or 0, 0)
        return max(self.again_backward_peak - (0 if input_held else self.freed_input_bytes), 0)

    def keep(self, *, input_held: bool) -> tuple[int, bool]:
        """Return the bytes that it adds by keeping its tensors, and whether its output is held then."""
        added = self.own_bytes + self.out_kept + (0 if input_held else self.in_kept)
        if self.same_storage:
            return added, input_held or self.in_kept > 0
        return added, self.out_held


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """The memory model's figures for a plan.

    Attributes:
        peak_bytes: The peak of allocated memory.
        extra_operations: Operations that are computed again, each time counted.
        kept_bytes: Bytes that are kept from the forward pass for the backward pass.
    """

    peak_bytes: int
    extra_operations: int
    kept_bytes: int


def pieces(start: int, stop: int, ranges: Ranges) -> Iterator[Range | int]:
    """Yield the ranges of one level and the layers between them, in order."""
    position = start
    for one in ranges:
        yield from range(position, one.start)
        yield one
        position = one.stop
    yield from range(position, stop)


def runs_again(ranges: Sequence[Range]) -> Iterator[int]:
    """Yield the layers that run more than once, each as often as it runs again."""
    for one in ranges:
        yield from range(one.start, one.stop)
        yield from runs_again(one.inner)


def boundaries(units: Sequence[Unit]) -> list[int]:
    """Return the bytes of the tensors that are passed into each unit, and out of the last."""
    found = [0]
    for unit in units:
        found.append(unit.out_bytes or (found[-1] if unit.same_storage else 0))
    return found


def last_saving(units: Sequence[Unit], start: int, stop: int) -> int:
    """Return the last unit in a range that keeps anything: running the range again stops in it. -1 if none does."""
    return next((at for at in range(stop - 1, start - 1, -1) if units[at].saves), -1)


def products_of(units: Sequence[Unit], one: Range) -> list[tuple[int, Product]]:
    """Return the matrix products that a range keeps instead of recomputing them, each with its unit's index."""
    every = [(at, product) for at in range(one.start, one.stop) for product in units[at].products] if one.kept else []
    return [every[number] for number in one.kept]


def bytes_kept(units: Sequence[Unit], one: Range) -> int:
    """Return the bytes of the products that a range keeps."""
    return sum(product.n_bytes for _, product in products_of(units, one))


def held_after(units: Sequence[Unit], one: Range) -> bool:
    """Return whether the output of a range is held after it ran: its input is, and products that it keeps."""
    if all(unit.same_storage for unit in units[one.start : one.stop]):
        return True
    return any(at == one.stop - 1 and product.is_output for at, product in products_of(units, one))


def ranges_with_products(units: Sequence[Unit], start: int, stop: int) -> list[Range]:
    """Return ranges over these units that keep some of the products: those that cost most operations per byte."""
    end = last_saving(units, start, stop)
    every = [(at, product) for at in range(start, stop) for product in units[at].products]
    useful = [
        number
        for number, (at, one) in enumerate(every)
        if one.may_be_kept and one.operations and (at < end or (at == end and not one.in_tail))
    ]
    useful.sort(key=lambda number: -every[number][1].operations / max(every[number][1].n_bytes, 1))
    counts = {math.ceil(len(useful) * n / _MOST_SETS) for n in range(1, _MOST_SETS + 1)} - {0}
    return [Range(start, stop, (), tuple(sorted(useful[:count]))) for count in sorted(counts)]


def estimate(
    units: Sequence[Unit], ranges: Ranges, first: int = 0, last: int | None = None, *, input_held: bool = True
) -> PlanEstimate:
    """Return the peak and the extra operations of a plan, following the step unit by unit.

    With `first` and `last` only these units are followed, as if the others kept nothing.
    """
    between = boundaries(units)
    peak = extra = 0

    def first_run(one: Range) -> int:
        """Return the peak of a range's first run, in which only some of its products are kept, above what is held."""
        found = kept = 0
        for at in range(one.start, one.stop):
            unit = units[at]
            added = sum(product.n_bytes for of, product in products_of(units, one) if of == at)
            need = min(unit.dropping_bytes + added, max(unit.forward_bytes, added))
            found = max(found, kept + (0 if at == one.start else between[at]) + unit.forward_base + need)
            kept += added
        return found

    def run(start: int, stop: int, ranges: Ranges, held: int, *, input_held: bool, again: bool) -> int:
        """Run units forward, keeping what is outside of ranges, then backward; return the bytes that were held."""
        nonlocal peak, extra
        end = last_saving(units, start, stop) if again else stop
        forward: list[tuple[Range | int, int, bool]] = []
        for piece in pieces(start, stop, ranges):
            had_input = input_held
            if isinstance(piece, Range):
                held += 0 if input_held else between[piece.start]
                # Where it runs forward within another range, it needs no more than when it runs again later.
                if not again:
                    peak = max(peak, held + first_run(piece))
                held += bytes_kept(units, piece)
                input_held = held_after(units, piece)
                extra += sum(unit.operations for unit in units[piece.start : piece.stop]) if again else 0
            else:
                unit = units[piece]
                if piece <= end:
                    base = units[stop - 1].backward_base if again else unit.forward_base
                    peak = max(peak, held + (0 if input_held else between[piece]) + base + unit.forward_bytes)
                    extra += (unit.operations - (unit.tail_operations if piece == end else 0)) if again else 0
                added, input_held = unit.keep(input_held=input_held)
                held += added
            forward.append((piece, held, had_input))
            peak = max(peak, held)
        for piece, then, had_input in reversed(forward):
            if isinstance(piece, Range):
                # What is kept of its products is part of what its layers keep when they run again.
                run(piece.start, piece.stop, piece.inner, then - bytes_kept(units, piece), input_held=True, again=True)
                extra -= sum(product.operations for _, product in products_of(units, piece))
            else:
                peak = max(peak, then + units[piece].backward_need(again=again, input_held=had_input))
        return held

    kept = run(first, len(units) if last is None else last, ranges, 0, input_held=input_held, again=False)
    return PlanEstimate(peak, extra, kept)


def kept_by_unit(units: Sequence[Unit], ranges: Ranges, *, input_held: bool = True) -> list[int]:
    """Return the bytes that each unit adds to what is kept for backward; a range's are its first unit's."""
    between = boundaries(units)
    kept = [0] * len(units)
    held = input_held
    for piece in pieces(0, len(units), ranges):
        if isinstance(piece, Range):
            kept[piece.start] = (0 if held else between[piece.start]) + bytes_kept(units, piece)
            held = held_after(units, piece)
        else:
            kept[piece], held = units[piece].keep(input_held=held)
    return kept


def as_forced(unit: Unit, n_bytes: int) -> Unit:
    """Return a unit that is recomputed by every plan: it keeps its input, and needs the rest in its backward pass."""
    peak = unit.backward_need(again=True, input_held=True) + unit.own_bytes + unit.out_kept
    return replace(
        unit,
        own_bytes=0,
        in_kept=n_bytes,
        out_kept=0,
        out_held=False,
        pinned=True,
        backward_peak=peak,
        again_backward_peak=peak,
    )


def joined(units: Sequence[Unit], start: int, stop: int, n_bytes: int) -> Unit:
    """Merge units start to stop into one unit. `n_bytes` is the size of the first one's input."""
    group = units[start:stop]
    if len(group) == 1:
        return group[0]
    kept, held, before = 0, True, n_bytes
    forward: list[int] = []
    dropping: list[int] = []
    backward: list[int] = []
    again: list[int] = []
    for unit in group:
        forward.append(kept + (0 if held else before) + unit.forward_base + unit.forward_bytes)
        dropping.append((0 if unit is group[0] else before) + unit.forward_base + unit.dropping_bytes)
        had_input = held
        added, held = unit.keep(input_held=held)
        kept += added
        backward.append(kept + unit.backward_need(again=False, input_held=True))
        again.append(kept + unit.backward_need(again=True, input_held=had_input))
        before = unit.out_bytes or (before if unit.same_storage else 0)
    same = all(unit.same_storage for unit in group)
    in_kept, out_kept = group[0].in_kept, 0 if same else before * held
    end = last_saving(group, 0, len(group))
    return replace(
        group[-1],
        own_bytes=max(kept - out_kept, 0),
        in_kept=in_kept,
        out_kept=min(out_kept, kept),
        out_held=held,
        out_bytes=0 if same else before,
        same_storage=same,
        may_start=group[0].may_start,
        pinned=any(unit.pinned for unit in group),
        saves=end >= 0,
        operations=sum(unit.operations for unit in group),
        tail_operations=sum(unit.operations for unit in group[end + 1 :])
        + (group[end].tail_operations if end >= 0 else 0),
        forward_base=group[0].forward_base,
        forward_bytes=max(forward) - group[0].forward_base,
        dropping_bytes=max(dropping) - group[0].forward_base,
        backward_peak=max(backward) - kept,
        again_backward_peak=max(again) - kept,
        freed_input_bytes=0,
        products=(),
    )
