"""A step as a row of units, ranges of them that are recomputed, and the memory that a plan is predicted to need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

_FEW_PRODUCTS = 4
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

    def without_ranges(self) -> ChainPlan:
        """Returns the same chain with nothing recomputed."""
        return replace(self, ranges=(), kept_bytes=self.plain_kept_bytes, extra_operations=0)


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
        out_bytes: The size of its output, of all tensors that it hands on; 0 if that is its input's storage (a view, or
            changed in place).
        in_kept: Bytes of its input that it keeps for backward.
        in_added: Those of them that no unit before it keeps.
        out_kept: Bytes of its output that it keeps and that are not its input's.
        out_held: Bytes of its output that it or units before it keep.
        same_storage: Whether its output is its input's storage.
        may_start: Whether a recomputed range may begin with it: nothing overwrites its input.
        pinned: Whether it must stay outside of recomputed ranges.
        chain: The index of its chain; None between chains.
        saves: Whether it keeps anything for backward, parameters included.
        operations: The operations of its forward pass.
        tail_operations: Those of them that follow the last tensor that is kept: recomputation stops there.
        forward_bytes: The peak of its forward pass, above what was allocated when it began.
        stopped_bytes: The same up to the last tensor that is kept.
        dropping_bytes: The peak of its forward pass if nothing is kept for backward.
        forward_base: What is allocated when its forward pass begins, besides what earlier units keep and its input.
        backward_base: What is allocated when its backward pass begins, besides what it and earlier units keep.
        backward_peak: The same at the peak of its backward pass; None if no gradient passes through it.
        again_backward_peak: The same in a range that ran again, whose tensors are freed earlier (see spent_tensors.py).
        again_bytes: Tensors besides its input that are there when it runs again though nothing keeps them, because the
            code around it refers to them.
        freed_input_bytes: How much lower this is where the unit alone holds its input.
        alongside: The same when it begins and nothing is kept: the index of the unit that made each, and its size.
        cached_bytes: Bytes of `own_bytes` that are there until the forward pass ends even if nothing keeps them: the
            weights that autocast casts.
        products: Its matrix products, convolutions and attention, in the order of their calls.
    """

    own_bytes: int = 0
    out_bytes: int = 0
    in_kept: int = 0
    in_added: int = 0
    out_kept: int = 0
    out_held: int = 0
    same_storage: bool = False
    may_start: bool = True
    pinned: bool = False
    chain: int | None = None
    saves: bool = True
    operations: int = 0
    tail_operations: int = 0
    forward_bytes: int = 0
    stopped_bytes: int = 0
    dropping_bytes: int = 0
    forward_base: int = 0
    backward_base: int = 0
    backward_peak: int | None = None
    again_backward_peak: int | None = None
    again_bytes: int = 0
    freed_input_bytes: int = 0
    alongside: tuple[tuple[int, int], ...] = ()
    cached_bytes: int = 0
    products: tuple[Product, ...] = ()

    def forward_need(self, *, keeping: bool, stops: bool) -> int:
        """Returns the peak of its forward pass, above what was allocated when it began.

        Args:
            keeping: It keeps tensors for backward, as outside of ranges.
            stops: It stops after the last tensor that is kept, as the last unit of a range that runs again.
        """
        if not keeping:
            return self.dropping_bytes
        return self.stopped_bytes if stops else self.forward_bytes

    def backward_need(self, *, again: bool, input_held: bool) -> int | None:
        """Returns the peak of its backward pass, above what it and earlier units keep; None if there is none.

        Args:
            again: The unit is in a range that ran again.
            input_held: Others hold its input.
        """
        if not again or self.again_backward_peak is None:
            return self.backward_peak
        return self.again_backward_peak - (0 if input_held else self.freed_input_bytes)


NOTHING, PART, ALL = 0, 1, 2
"""The parts of a boundary that may be held: nothing, the tensors that units before it keep, or all of them."""


class Boundary(NamedTuple):
    """The tensors between two units.

    Attributes:
        n_bytes: Their size.
        kept: The part of it that units before keep, if they are outside of ranges.
    """

    n_bytes: int
    kept: int

    @property
    def is_partial(self) -> bool:
        """True if units before keep some of it. Where they keep nothing or all of it, PART is the same as ALL."""
        return 0 < self.kept < self.n_bytes

    def missing(self, held: int) -> int:
        """Returns the bytes that are not held."""
        if held == NOTHING:
            return self.n_bytes
        return self.n_bytes - self.kept if held == PART and self.is_partial else 0


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
    """Yields the ranges of one level and the layers between them, in order."""
    position = start
    for one in ranges:
        yield from range(position, one.start)
        yield one
        position = one.stop
    yield from range(position, stop)


def runs_again(ranges: Sequence[Range]) -> Iterator[int]:
    """Yields the layers that run more than once, each as often as it runs again."""
    for one in ranges:
        yield from range(one.start, one.stop)
        yield from runs_again(one.inner)


def after_keeping(unit: Unit, before: Boundary, held: int) -> tuple[int, int]:
    """Returns the bytes that a unit adds by keeping its tensors, and what is held of its output afterwards."""
    partly = held == PART and before.is_partial
    added = unit.own_bytes + unit.out_kept
    if held == NOTHING or partly:
        added += unit.in_added if partly else unit.in_kept
    if unit.same_storage and not partly:
        return added, PART if held or unit.in_kept else NOTHING
    return added, PART if unit.out_held else NOTHING


def boundaries(units: Sequence[Unit]) -> list[Boundary]:
    """Returns what is handed on before each unit and after the last."""
    found = [Boundary(0, 0)]
    for unit in units:
        n_bytes = unit.out_bytes or (found[-1].n_bytes if unit.same_storage else 0)
        found.append(Boundary(n_bytes, unit.out_held))
    return found


def last_saving(units: Sequence[Unit], start: int, stop: int) -> int:
    """Returns the last unit in a range that keeps anything: running the range again stops in it. -1 if none does."""
    return next((at for at in range(stop - 1, start - 1, -1) if units[at].saves), -1)


def kept_products(units: Sequence[Unit], one: Range) -> dict[int, list[Product]]:
    """Returns the products that a range keeps, by unit."""
    if not one.kept:
        return {}
    found: dict[int, list[Product]] = {}
    every = [(at, product) for at in range(one.start, one.stop) for product in units[at].products]
    for number in one.kept:
        at, product = every[number]
        found.setdefault(at, []).append(product)
    return found


def held_after(units: Sequence[Unit], one: Range) -> int:
    """Returns what is held of the output of a range after it ran: its input is, and products that it keeps."""
    if all(unit.same_storage for unit in units[one.start : one.stop]):
        return PART
    last = units[one.stop - 1]
    kept = any(product.is_output for product in kept_products(units, one).get(one.stop - 1, ()))
    # Of several tensors a product is only one.
    return PART if kept and not Boundary(last.out_bytes, last.out_held).is_partial else NOTHING


def ranges_with_products(units: Sequence[Unit], start: int, stop: int) -> list[Range]:
    """Returns the ranges of these units that keep products and so run less of them again.

    Of up to four products every subset; of more, those that save most operations for their size first.
    """
    end = last_saving(units, start, stop)
    every = [(at, product) for at in range(start, stop) for product in units[at].products]
    useful = [
        number
        for number, (at, one) in enumerate(every)
        if one.may_be_kept and one.operations and (at < end or (at == end and not one.in_tail))
    ]
    if len(useful) <= _FEW_PRODUCTS:
        sets = [kept for n in range(1, len(useful) + 1) for kept in combinations(useful, n)]
    else:
        useful.sort(key=lambda number: -every[number][1].operations / max(every[number][1].n_bytes, 1))
        counts = {round(len(useful) * n / _MOST_SETS) for n in range(1, _MOST_SETS + 1)}
        sets = [tuple(sorted(useful[:count])) for count in sorted(counts) if count]
    return [Range(start, stop, (), kept) for kept in sets]


def _bytes_of(products: Sequence[Product]) -> int:
    return sum(product.n_bytes for product in products)


def estimate(
    units: Sequence[Unit],
    ranges: Ranges,
    first: int = 0,
    last: int | None = None,
    *,
    held: int = ALL,
    between: Sequence[Boundary] | None = None,
) -> PlanEstimate:
    """Returns the peak and the extra operations of a plan, following the step unit by unit.

    With `first` and `last` only these units are followed, as if the others kept nothing; `held` says what is held of
    the first one's input. `between` are the boundaries, where they are known already.
    """
    simulated = _SimulatedStep(units, boundaries(units) if between is None else between)
    simulated.run(first, len(units) if last is None else last, ranges, 0, held, again=False)
    return PlanEstimate(simulated.peak, simulated.extra, simulated.kept)


class _SimulatedStep:
    """Runs units forward and back by the memory model, and notes the peak and what is computed again."""

    def __init__(self, units: Sequence[Unit], between: Sequence[Boundary]) -> None:
        self.peak = 0
        self.extra = 0
        self.kept = 0
        self._units = units
        self._between = between
        self._kept: dict[int, int] = {}  # the bytes of products, by unit, of the range that runs again

    def run(self, start: int, stop: int, ranges: Ranges, held: int, of_input: int, *, again: bool) -> None:
        """Run units forward, keeping what is outside of ranges, then backward.

        Args:
            start: The first unit.
            stop: The index after the last.
            ranges: The ranges of this level.
            held: Bytes that are held before.
            of_input: What of the first unit's input is among these.
            again: Whether this is a range that runs again.
        """
        base = self._units[stop - 1].backward_base if again else None
        end = last_saving(self._units, start, stop) if again else None
        forward: list[tuple[Range | int, int, int]] = []
        cached = 0  # besides what is held
        for piece in pieces(start, stop, ranges):
            held_before = of_input
            if isinstance(piece, Range):
                held += self._between[piece.start].missing(of_input)
                kept = kept_products(self._units, piece)
                self._run_range(piece, held + cached, base, kept)
                held += sum(map(_bytes_of, kept.values()))
                cached += sum(unit.cached_bytes for unit in self._units[piece.start : piece.stop])
                of_input = held_after(self._units, piece)
                if again:
                    self.extra += sum(unit.operations for unit in self._units[piece.start : piece.stop])
            else:
                before = self._between[piece]
                self._run_unit(piece, held + cached + before.missing(of_input), base, end)
                added, of_input = after_keeping(self._units[piece], before, of_input)
                held += added
            forward.append((piece, held, held_before))
            self.peak = max(self.peak, held)
        if not again:
            self.kept = held
        for piece, then, held_before in reversed(forward):
            if isinstance(piece, Range):
                self._run_back(piece, then)
            elif (top := self._units[piece].backward_need(again=again, input_held=held_before > NOTHING)) is not None:
                self.peak = max(self.peak, then + top)

    def _run_back(self, one: Range, held: int) -> None:
        """Run a range again and backward. What is kept of its products is part of what its layers keep then."""
        kept = kept_products(self._units, one)
        self._kept = {at: _bytes_of(products) for at, products in kept.items()}
        self.run(one.start, one.stop, one.inner, held - sum(self._kept.values()), ALL, again=True)
        self.extra -= sum(product.operations for products in kept.values() for product in products)
        self._kept = {}

    def _run_range(self, one: Range, held: int, base: int | None, kept: dict[int, list[Product]]) -> None:
        """Run a range forward: its input is held, and nothing else is kept but for some of its products."""
        below = self._units[one.start].forward_base if base is None else base
        input_held = True
        for at in range(one.start, one.stop):
            unit = self._units[at]
            made = sum(size for maker, size in unit.alongside if maker >= one.start)
            missing = 0 if at == one.start else made + (0 if input_held else self._between[at].n_bytes)
            need = unit.forward_need(keeping=False, stops=False)
            added = _bytes_of(kept.get(at, ()))
            if added:  # the layer's peak may be before or after these are made, but keeps no more than everything
                need = min(need + added, max(unit.forward_need(keeping=True, stops=False), added))
            self.peak = max(self.peak, held + missing + below + need)
            held += added
            input_held = any(product.is_output for product in kept.get(at, ()))

    def _run_unit(self, at: int, held: int, base: int | None, end: int | None) -> None:
        """Run a unit forward that keeps its tensors; its input is among what is held.

        `end` is the unit in which running again stops; None at first.
        """
        if end is not None and at > end:
            return
        unit, stops = self._units[at], at == end
        below = unit.forward_base if base is None else base
        # Until they are reached, the kept products of this and later layers are there besides.
        later = sum(size for other, size in self._kept.items() if other > at) if self._kept else 0
        need = max(unit.forward_need(keeping=True, stops=stops), self._kept.get(at, 0))
        if end is not None:
            need += unit.again_bytes
        self.peak = max(self.peak, held + below + later + need)
        if end is not None:
            self.extra += unit.operations - (unit.tail_operations if stops else 0)


def kept_by_unit(units: Sequence[Unit], ranges: Ranges) -> list[int]:
    """Returns the bytes that each unit adds to what is kept for backward; a range's are its first unit's."""
    between = boundaries(units)
    kept = [0] * len(units)
    held = ALL
    for piece in pieces(0, len(units), ranges):
        if isinstance(piece, Range):
            kept[piece.start] = between[piece.start].missing(held)
            kept[piece.start] += sum(map(_bytes_of, kept_products(units, piece).values()))
            held = held_after(units, piece)
        else:
            kept[piece], held = after_keeping(units[piece], between[piece], held)
    return kept


def may_be_range(units: Sequence[Unit], start: int, stop: int) -> bool:
    """Returns whether units can be one recomputed range: of one chain, none pinned, and their input is not changed."""
    chain = units[start].chain
    return (
        chain is not None
        and units[start].may_start
        and all(unit.chain == chain and not unit.pinned for unit in units[start:stop])
    )


def as_forced(unit: Unit, before: Boundary) -> Unit:
    """Returns a unit that is recomputed by every plan: it keeps its input, and needs the rest in its backward pass."""
    kept = unit.own_bytes + unit.out_kept
    need = unit.backward_need(again=True, input_held=True)
    top = None if need is None else need + kept
    return replace(
        unit,
        own_bytes=0,
        in_kept=before.n_bytes,
        in_added=before.missing(PART),
        out_kept=0,
        out_held=0,
        pinned=True,
        backward_peak=top,
        again_backward_peak=top,
    )
