"""The memory model that plans are chosen by: what each piece of a step keeps, and what it needs for a moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memtools.checkpointing.ranges import Range, Ranges, items


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer, or what a model does between two chains. Sizes in bytes, each storage counted once.

    Attributes:
        own_bytes: What it keeps for backward, besides its input and its output.
        out_bytes: Its output; 0 where that is its input's storage (a view, or changed in place).
        keeps_input: Whether it keeps its input for backward.
        keeps_output: Whether it keeps its output for backward.
        same_storage: Whether its output is its input's storage.
        may_start: Whether a recomputed range may begin with it: nothing overwrites its input.
        pinned: Whether it has to stay outside of recomputed ranges.
        chain: The chain it belongs to; None between chains.
        saves: Whether it keeps anything for backward, parameters included.
        operations: What its forward pass computes.
        tail_operations: The part of these after the last tensor was kept: recomputation stops there.
        forward_bytes: What its forward pass needs at its highest, beyond what was there when it began.
        stopped_bytes: The same up to the last tensor that is kept.
        dropping_bytes: What its forward pass needs at its highest where nothing is kept for backward.
        forward_base: In the forward pass, what is there when it begins besides what earlier units keep and its input.
        backward_base: In the backward pass, what is there when it begins besides what this and earlier units keep.
        backward_peak: The same at its highest. None where no gradient passes.
    """

    own_bytes: int = 0
    out_bytes: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
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

    def needs(self, *, keeping: bool, stops: bool) -> int:
        """What running it forward needs at its highest: in a range, or where it keeps; whole, or to its last save."""
        if not keeping:
            return self.dropping_bytes
        return self.stopped_bytes if stops else self.forward_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of a plan.

    Attributes:
        peak_bytes: The highest that is allocated.
        extra_operations: What is computed a second time or more often.
        kept_bytes: What is kept from the forward pass for the backward pass.
    """

    peak_bytes: int
    extra_operations: int
    kept_bytes: int


def after_keeping(unit: Unit, *, input_held: bool, in_bytes: int) -> tuple[int, bool]:
    """The bytes that keeping a unit adds, and whether its output is held afterwards."""
    added = unit.own_bytes
    held = input_held
    if unit.keeps_input and not held:
        added += in_bytes
        held = True
    out_held = held if unit.same_storage else False
    if unit.keeps_output and not out_held:
        added += in_bytes if unit.same_storage else unit.out_bytes
        out_held = True
    return added, out_held


def boundary_bytes(units: Sequence[Unit]) -> list[int]:
    """The bytes of the storage before each unit and after the last."""
    sizes = [0]
    for unit in units:
        sizes.append(sizes[-1] if unit.same_storage else unit.out_bytes)
    return sizes


def last_saving(units: Sequence[Unit], start: int, stop: int) -> int:
    """The last unit in a range that keeps anything: running the range again stops in it. -1 where none does."""
    return next((at for at in range(stop - 1, start - 1, -1) if units[at].saves), -1)


def estimate(
    units: Sequence[Unit], ranges: Ranges, first: int = 0, last: int | None = None, *, input_held: bool = True
) -> Estimate:
    """The peak and the extra operations of a plan, followed through the step piece by piece.

    With `first` and `last` only these units are followed, as if nothing were kept of the others.
    """
    sizes = boundary_bytes(units)
    peak = 0
    extra = 0
    kept = 0

    def visit(start: int, stop: int, ranges: Ranges, held: int, *, input_held: bool, again: bool) -> None:
        """Run units forward, keeping what is not in a range, then backward."""
        nonlocal peak, extra, kept
        base = units[stop - 1].backward_base if again else None
        end = last_saving(units, start, stop)
        undone: list[tuple[Range | int, int]] = []
        for item in items(start, stop, ranges):
            begin = item.start if isinstance(item, Range) else item
            after = item.stop if isinstance(item, Range) else item + 1
            keeps_boundary = isinstance(item, Range) and not input_held
            held += sizes[begin] if keeps_boundary else 0
            for at in range(begin, after):
                missing = 0 if at == begin and (input_held or keeps_boundary) else sizes[at]
                below = units[at].forward_base if base is None else base
                # Running again ends with the last tensor that is kept; a range within runs in full before that.
                stops = again and at == end and not isinstance(item, Range)
                if not again or at <= end or isinstance(item, Range):
                    needs = units[at].needs(keeping=not isinstance(item, Range), stops=stops)
                    peak = max(peak, held + missing + below + needs)
                    if again:
                        extra += units[at].operations - (units[at].tail_operations if stops else 0)
            if isinstance(item, Range):
                undone.append((item, held))
                input_held = all(units[at].same_storage for at in range(begin, after))
            else:
                added, input_held = after_keeping(units[item], input_held=input_held, in_bytes=sizes[item])
                held += added
                undone.append((item, held))
            peak = max(peak, held)
        kept = held if not again else kept
        for item, then in reversed(undone):
            if isinstance(item, Range):
                visit(item.start, item.stop, item.inner, then, input_held=True, again=True)
            else:
                top = units[item].backward_peak
                if top is not None:
                    peak = max(peak, then + top)

    visit(first, len(units) if last is None else last, ranges, 0, input_held=input_held, again=False)
    return Estimate(peak, extra, kept)


def kept_by_chain(units: Sequence[Unit], ranges: Ranges) -> Counter[int]:
    """What each chain keeps from the forward pass for the backward pass, in bytes; -1 stands for what is in none."""
    sizes = boundary_bytes(units)
    kept: Counter[int] = Counter()
    held = True
    for item in items(0, len(units), ranges):
        if isinstance(item, Range):
            chain, added = units[item.start].chain, 0 if held else sizes[item.start]
            held = all(unit.same_storage for unit in units[item.start : item.stop])
        else:
            chain = units[item].chain
            added, held = after_keeping(units[item], input_held=held, in_bytes=sizes[item])
        kept[-1 if chain is None else chain] += added
    return kept


def may_be_range(units: Sequence[Unit], start: int, stop: int) -> bool:
    """Whether units can be one recomputed range: of one chain, none pinned, and its input survives."""
    chain = units[start].chain
    return (
        chain is not None
        and units[start].may_start
        and all(unit.chain == chain and not unit.pinned for unit in units[start:stop])
    )


def as_forced(unit: Unit) -> Unit:
    """A unit that is recomputed in any case, as one that keeps its input and needs the rest while it goes backward."""
    kept = unit.own_bytes + (unit.out_bytes if unit.keeps_output else 0)
    top = None if unit.backward_peak is None else unit.backward_peak + kept
    return replace(unit, own_bytes=0, keeps_input=True, keeps_output=False, pinned=True, backward_peak=top)
