"""Follows a bad loss or gradient backwards, through bad values only, to the operation that made the first."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lightning_memtools.memory.nested_tensors import named_tensors, plain_name, tensors_in_attributes
from lightning_memtools.nonfinite.causes import public_name
from lightning_memtools.nonfinite.guarded_step import bad_inputs, list_samples
from lightning_memtools.nonfinite.operation_trace import NAN, BadKinds, BadOperation, StorageKeys
from lightning_memtools.nonfinite.step_rerun import StepRerun


class ValueOrigin(StrEnum):
    """The origin of a bad value."""

    OPERATION = "operation"
    BATCH = "batch"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class PriorTensor:
    """A tensor that existed before the step."""

    origin: ValueOrigin  # the kind of tensor
    name: str
    may_be_infinite: bool  # whether infinities in it are intended, as in masks and bounds


UNKNOWN = PriorTensor(ValueOrigin.ELSEWHERE, "a tensor from elsewhere", may_be_infinite=True)


class PriorTensors:
    """Knows the tensors in memory that no operation of the step wrote."""

    def __init__(self, rerun: StepRerun, memory: StorageKeys) -> None:
        self._known: dict[int | None, PriorTensor] = {}
        for name, tensor in tensors_in_attributes(rerun.module):
            self._known[memory.key(tensor)] = PriorTensor(ValueOrigin.ATTRIBUTE, name, may_be_infinite=True)
        for name, buffer in rerun.module.named_buffers():
            self._known[memory.key(buffer)] = PriorTensor(ValueOrigin.BUFFER, plain_name(name), may_be_infinite=True)
        for name, parameter in rerun.module.named_parameters():
            leaf = PriorTensor(ValueOrigin.PARAMETER, plain_name(name), may_be_infinite=not parameter.requires_grad)
            self._known[memory.key(parameter)] = leaf
        for micro in rerun.micro:
            masks = {bad.name for bad in bad_inputs(micro) if bad.is_mask}
            for name, tensor in named_tensors(micro.batch, "batch"):
                self._known[memory.key(tensor)] = PriorTensor(ValueOrigin.BATCH, name, may_be_infinite=name in masks)

    def __call__(self, key: int) -> PriorTensor:
        """Return the tensor in the memory with this key."""
        return self._known.get(key, UNKNOWN)


@dataclass(frozen=True, slots=True)
class BadValueRoot:
    """The root of a bad value."""

    event: BadOperation  # the operation that made it; if it existed before the step, the first operation that used it
    leaf: PriorTensor | None = None  # the tensor that held it before the step; None where an operation made it

    @property
    def is_benign(self) -> bool:
        """True for an intended infinity: written in the code, or in a mask or bound."""
        if self.leaf is not None:
            return self.leaf.may_be_infinite
        return self.event.constant and not self.event.gives_nan


def find_bad_value_root(
    events: Sequence[BadOperation], start: Iterable[int], leaf_of: Callable[[int], PriorTensor]
) -> BadValueRoot | None:
    """Return the root of the bad values in the memory `start`.

    Intended infinities, such as those of a mask, are no root: if the way back ends in nothing else, the root is the
    operation that made NaN from them.

    Args:
        events: The operations with bad outputs, in order.
        start: The keys of the memory that is bad at the end.
        leaf_of: Returns the tensor in a piece of memory that no operation wrote.
    """
    found = _BackwardSlice(events, leaf_of)
    found.follow(start)
    real = [root for root in found.roots if not root.is_benign]
    if real:
        root = min(real, key=lambda root: root.event.number)
        return root if root.leaf is None else replace(root, event=_first_use(events, root.event))
    if found.converters:
        return BadValueRoot(min(found.converters, key=lambda event: event.number))
    return min(found.roots, key=lambda root: root.event.number, default=None)


_COPIES = frozenset({"aten.clone", "aten._to_copy"})


def _first_use(events: Sequence[BadOperation], event: BadOperation) -> BadOperation:
    """Return the first operation that computes with what an operation took: copies, as an LSTM makes, say nothing."""
    while event.operation in _COPIES:
        made, after = {use.key for use in event.outputs}, bisect_right(events, event.number, key=lambda one: one.number)
        users = (one for one in events[after:] if any(use.key in made for use in one.inputs))
        following = next(users, None)
        if following is None:
            break
        event = following
    return event


class _BackwardSlice:
    """The way back from bad values, and the roots that it ends in."""

    def __init__(self, events: Sequence[BadOperation], leaf_of: Callable[[int], PriorTensor]) -> None:
        self.roots: list[BadValueRoot] = []
        self.converters: list[BadOperation] = []  # operations that made NaN from infinities
        self._events = events
        self._leaf_of = leaf_of
        self._writers: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(events):
            for use in event.outputs:
                self._writers[use.key].append(index)

    def follow(self, start: Iterable[int]) -> None:
        """Walk back from the memory `start`."""
        # Of each event, either the origin of its NaN or the origin of its infinity is wanted.
        waiting: list[tuple[int, bool]] = []
        for key in start:
            index = self._writer_of(key, len(self._events))
            if index is not None:
                waiting.append((index, NAN in _kinds(self._events[index], key)))
        seen: set[tuple[int, bool]] = set()
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += self._before(*one)

    def _before(self, index: int, wants_nan: bool) -> list[tuple[int, bool]]:
        """Return the events that an event got its bad values from."""
        event = self._events[index]
        inputs = event.inputs
        if wants_nan:
            with_nan = tuple(use for use in inputs if NAN in use.kinds)
            if inputs and not with_nan:
                self.converters.append(event)
            inputs = with_nan or inputs
        if not inputs:
            self.roots.append(BadValueRoot(event))
        earlier = []
        for use in inputs:
            writer = self._writer_of(use.key, index, wants_nan=NAN in use.kinds)
            writer = self._writer_of(use.key, index) if writer is None else writer
            if writer is not None:
                earlier.append((writer, NAN in use.kinds))
            else:
                leaf = self._leaf_of(use.key)
                self.roots.append(BadValueRoot(event, leaf if NAN not in use.kinds else _without_excuse(leaf)))
        return earlier

    def _writer_of(self, key: int, before: int, *, wants_nan: bool = False) -> int | None:
        """Return the index of the last event before this one that wrote a bad value there.

        With `wants_nan`, a NaN: another part of the memory may have been filled with infinities since.
        """
        writers = reversed(self._writers[key][: bisect_left(self._writers[key], before)])
        return next((index for index in writers if not wants_nan or NAN in _kinds(self._events[index], key)), None)


def _kinds(event: BadOperation, key: int) -> BadKinds:
    return frozenset().union(*(use.kinds for use in event.outputs if use.key == key))


def _without_excuse(leaf: PriorTensor) -> PriorTensor:
    return PriorTensor(leaf.origin, leaf.name, may_be_infinite=False)


def describe_root(root: BadValueRoot, class_name: str, samples: Sequence[int], batch_idx: int) -> str:
    """Return the operation, its place and its inputs, as a sentence."""
    event = root.event
    where = f"{_where(event, class_name)}"
    if root.leaf is not None:
        what = root.leaf.name if root.leaf.origin is ValueOrigin.ELSEWHERE else f"{root.leaf.origin} {root.leaf.name}"
        if root.leaf.origin is ValueOrigin.BATCH:
            what = "the batch" if root.leaf.name == "batch" else root.leaf.name
        return f"The first bad value was in {what}, first used by {public_name(event.operation)} in {where}."
    by = public_name(event.operation)
    if event.backward:
        by = f"{by} in the backward of {public_name(event.of_forward)}" if event.of_forward else f"{by} in backward"
    return f"The first bad value was made by {by} in {where}{_took(event)}{_affected(samples, batch_idx)}."


def _where(event: BadOperation, class_name: str) -> str:
    function = f".{event.place.function}" if event.place is not None and not event.place.caller else ""
    module = event.module or f"{class_name}{function}"
    return module if event.place is None else f"{module} ({event.place})"


def _took(event: BadOperation) -> str:
    divides = event.operation.rstrip("_").endswith("div")
    told = [n for n in event.scalars if not math.isfinite(n) or (divides and not n)]
    took = [*map(str, event.took), *(f"the number {number:g}" for number in told)]
    return f", from {' and '.join(took)}" if took else ""


def _affected(samples: Sequence[int], batch_idx: int) -> str:
    return f"; it affects {list_samples(samples)} of batch {batch_idx}" if samples else ""
