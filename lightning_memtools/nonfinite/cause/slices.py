"""From a bad loss or gradient backwards, through bad values only, to the operation that made the first."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_memtools.nonfinite.cause.trace import Event, Kinds
from lightning_memtools.nonfinite.cause.values import NAN


class Origin(StrEnum):
    """What a bad value comes from."""

    OPERATION = "operation"
    BATCH = "batch"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that was there before the step.

    Attributes:
        origin: What it is.
        name: Its name.
        may_be_infinite: Whether infinities in it are there by right: masks and bounds.
    """

    origin: Origin
    name: str
    may_be_infinite: bool


UNKNOWN = Leaf(Origin.CONSTANT, "a tensor that the step found", may_be_infinite=True)


@dataclass(frozen=True, slots=True)
class Root:
    """Where a bad value comes from.

    Attributes:
        event: The operation that made it; where it was there before, the first operation that took it.
        leaf: The tensor that held it before the step; None where an operation made it.
    """

    event: Event
    leaf: Leaf | None = None

    @property
    def is_benign(self) -> bool:
        """Whether it is an infinity that was meant: written in the code, or in a mask or bound."""
        if self.leaf is not None:
            return self.leaf.may_be_infinite
        return self.event.constant and not self.event.gives_nan


def find_root(events: Sequence[Event], start: Iterable[int], leaf_of: Callable[[int], Leaf]) -> Root | None:
    """The root of the bad values in the memory `start`.

    Infinities that were meant, such as a mask's, are no root: if a slice ends in nothing else, the root is the
    operation that made a NaN of them.

    Args:
        events: The operations that gave bad values, in order.
        start: Keys of the memory that is bad at the end.
        leaf_of: What lies in a piece of memory that no operation wrote.
    """
    roots: list[Root] = []
    converters: list[Event] = []
    writers: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        for use in event.outputs:
            writers[use.key].append(index)

    def writer_of(key: int, before: int) -> int | None:
        position = bisect_left(writers[key], before)
        return writers[key][position - 1] if position else None

    # What is wanted of an event: why its NaN, or why its infinity.
    waiting = [(index, NAN in _kinds(events[index], key)) for key in start
               if (index := writer_of(key, len(events))) is not None]  # fmt: skip
    seen: set[tuple[int, bool]] = set()
    while waiting:
        index, wants_nan = waiting.pop()
        if (index, wants_nan) in seen:
            continue
        seen.add((index, wants_nan))
        event = events[index]
        inputs = event.inputs
        if wants_nan:
            with_nan = tuple(use for use in inputs if NAN in use.kinds)
            if inputs and not with_nan:
                converters.append(event)
            inputs = with_nan or inputs
        if not inputs:
            roots.append(Root(event))
        for use in inputs:
            earlier = writer_of(use.key, index)
            if earlier is not None:
                waiting.append((earlier, NAN in use.kinds))
                continue
            leaf = leaf_of(use.key)
            roots.append(Root(event, leaf if NAN not in use.kinds else _without_excuse(leaf)))
    if not roots:
        return None
    real = [root for root in roots if not root.is_benign]
    if real:
        return min(real, key=lambda root: root.event.number)
    if converters:
        return Root(min(converters, key=lambda event: event.number))
    return min(roots, key=lambda root: root.event.number)


def _kinds(event: Event, key: int) -> Kinds:
    return frozenset().union(*(use.kinds for use in event.outputs if use.key == key))


def _without_excuse(leaf: Leaf) -> Leaf:
    return Leaf(leaf.origin, leaf.name, may_be_infinite=False)
