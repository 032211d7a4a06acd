"""Follows a bad loss or gradient backwards, through bad values only, to the operation that made the first bad value."""

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
from lightning_memtools.nonfinite.operation_trace import BadOperation, StorageKeys
from lightning_memtools.nonfinite.step_rerun import StepRerun


class ValueOrigin(StrEnum):
    """The kinds of tensors from which a NaN or Inf can come, such as a batch or a parameter."""

    BATCH = "batch"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class PriorTensor:
    """A tensor that existed before the step: its kind, its name, and whether Inf in it may be intended."""

    origin: ValueOrigin  # the kind of tensor
    name: str
    may_be_infinite: bool  # whether infinities in it are intended, as in masks and bounds


UNKNOWN = PriorTensor(ValueOrigin.ELSEWHERE, "a tensor from elsewhere", may_be_infinite=True)


LeafOf = Callable[[int], PriorTensor]
"""Returns the tensor in a piece of memory that no operation wrote."""


class PriorTensors:
    """Looks up, by storage key, the tensors that existed before the step: weights, buffers, attributes and batches."""

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
            masks = {bad.name for bad in bad_inputs(micro) if bad.is_mask}  # where they are used as masks are
            for name, tensor in named_tensors(micro.batch, "batch"):
                self._known[memory.key(tensor)] = PriorTensor(ValueOrigin.BATCH, name, may_be_infinite=name in masks)

    def __call__(self, key: int) -> PriorTensor:
        """Return the tensor whose storage has this key; `UNKNOWN` if none of the tensors has it."""
        return self._known.get(key, UNKNOWN)


@dataclass(frozen=True, slots=True)
class BadValueRoot:
    """The place where NaN or Inf first appeared: an operation, or a tensor that existed before the step."""

    event: BadOperation  # the operation that made it; if it existed before the step, the first operation that used it
    leaf: PriorTensor | None = None  # the tensor that held it before the step; None where an operation made it

    @property
    def is_benign(self) -> bool:
        """True if this is an Inf that is likely intended: a constant in the code, or a value in a mask or bound."""
        if self.leaf is not None:
            return self.leaf.may_be_infinite
        return self.event.constant and not self.event.gives_nan


def find_bad_value_root(events: Sequence[BadOperation], start: Iterable[int], leaf_of: LeafOf) -> BadValueRoot | None:
    """Return where the NaN or Inf in the storages `start` first appeared; None if that was not recorded.

    An Inf that is intended, such as in a mask, does not count. If every Inf is intended, return the operation that
    turned Inf into NaN.

    Args:
        events: The operations with NaN or Inf in their outputs, in the order in which they ran.
        start: The keys of the storages to explain, such as the key of the loss.
        leaf_of: A function that returns the tensor in a storage that no operation wrote, given the storage's key.
    """
    way_back = _BackwardSlice(events, start, leaf_of)
    real = [root for root in way_back.roots if not root.is_benign]
    if real:
        root = min(real, key=lambda root: root.event.number)
        return root if root.leaf is None else replace(root, event=_first_use(events, root.event))
    if way_back.converters:
        return BadValueRoot(min(way_back.converters, key=lambda event: event.number))
    return min(way_back.roots, key=lambda root: root.event.number, default=None)


def are_masked(events: Sequence[BadOperation], start: Iterable[int], leaf_of: LeafOf) -> bool:
    """Return True if the code multiplied every NaN by a zero of a mask. This does not remove NaN: NaN * 0 is NaN."""
    return not _BackwardSlice(events, start, leaf_of, ends_at_masks=True).roots


def _first_use(events: Sequence[BadOperation], event: BadOperation) -> BadOperation:
    """Return `event`, or, if it only copies its input, the first later operation that computes with the copy."""
    while event.operation in {"aten.clone", "aten._to_copy"}:
        made = {use.key for use in event.outputs}
        after = events[bisect_right(events, event.number, key=lambda each: each.number) :]
        user = next((each for each in after if any(use.key in made for use in each.inputs)), None)
        if user is None:
            break
        event = user
    return event


# What a mask of -inf is for. -inf in data that a layer multiplies by its weights is not meant.
_OF_MASKS = ("add", "where", "masked_fill", "softmax", "log_softmax", "logsumexp", "exp", "maximum", "minimum", "max")


def _masks(event: BadOperation) -> bool:
    name = event.operation.removeprefix("aten.").removesuffix("_")
    return name in {*_OF_MASKS, "amax", "cat", "stack", "index", "gather", "clamp"} or "attention" in name


class _BackwardSlice:
    """Traces the NaN and Inf in the storages `start` back through the operations to where they first appeared."""

    def __init__(
        self, events: Sequence[BadOperation], start: Iterable[int], leaf_of: LeafOf, *, ends_at_masks: bool = False
    ) -> None:
        self.roots: list[BadValueRoot] = []
        self.converters: list[BadOperation] = []  # operations that made NaN from infinities
        self._events, self._leaf_of, self._ends_at_masks = events, leaf_of, ends_at_masks
        self._writers: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(events):
            for use in event.outputs:
                self._writers[use.key].append(index)
        # Of each event, either the origin of its NaN or the origin of its infinity is wanted.
        waiting: list[tuple[int, bool]] = []
        for key in start:
            writer = self._writer_of(key, len(self._events))
            if writer is not None:
                waiting.append((writer, self._holds_nan(writer, key)))
        seen: set[tuple[int, bool]] = set()
        while waiting:
            wanted = waiting.pop()
            if wanted not in seen:
                seen.add(wanted)
                waiting += self._before(*wanted)

    def _before(self, index: int, wants_nan: bool) -> list[tuple[int, bool]]:
        """Return the events that wrote the bad inputs of event `index`, as (index, whether the input holds NaN)."""
        event = self._events[index]
        if self._ends_at_masks and event.masks:
            return []
        inputs = event.inputs
        if wants_nan:
            with_nan = tuple(use for use in inputs if use.has_nan)
            if inputs and not with_nan:
                self.converters.append(event)
            inputs = with_nan or inputs
        if not inputs:
            self.roots.append(BadValueRoot(event))
        earlier = []
        for use in inputs:
            writer = self._writer_of(use.key, index, wants_nan=use.has_nan)
            writer = self._writer_of(use.key, index) if writer is None else writer
            if writer is not None:
                earlier.append((writer, use.has_nan))
            else:
                leaf = self._leaf_of(use.key)
                user = _first_use(self._events, event)
                is_meant = not use.has_nan and (leaf.origin is not ValueOrigin.BATCH or user.backward or _masks(user))
                self.roots.append(BadValueRoot(event, leaf if is_meant else replace(leaf, may_be_infinite=False)))
        return earlier

    def _writer_of(self, key: int, before: int, *, wants_nan: bool = False) -> int | None:
        """Return the index of the last event before event `before` that wrote NaN or Inf to the storage `key`, or None.

        With `wants_nan`, only events that wrote NaN count, because later events may have written Inf to other elements.
        """
        writers = reversed(self._writers[key][: bisect_left(self._writers[key], before)])
        return next((index for index in writers if not wants_nan or self._holds_nan(index, key)), None)

    def _holds_nan(self, index: int, key: int) -> bool:
        return any(use.has_nan for use in self._events[index].outputs if use.key == key)


def describe_root(root: BadValueRoot, kind: type, samples: Sequence[int], batch_idx: int) -> str:
    """Return a sentence on where NaN or Inf first appeared: the operation, code line, inputs and affected samples."""
    event, leaf, by = root.event, root.leaf, public_name(root.event.operation)
    function = "" if event.place is None or event.place.caller else event.place.function
    is_own = function and hasattr(kind, function) and not function.startswith("__")  # __call__ is of any class
    where = event.module or (f"{kind.__name__}.{function}" if is_own else function or kind.__name__)
    where = where if event.place is None else f"{where} ({event.place})"
    if leaf is not None:
        what = leaf.name if leaf.origin is ValueOrigin.ELSEWHERE else f"{leaf.origin} {leaf.name}"
        if leaf.origin is ValueOrigin.BATCH:
            what = "the batch" if leaf.name == "batch" else leaf.name
        return f"The first bad value was in {what}, first used by {by} in {where}."
    if event.backward:
        by = f"{by} in the backward of {public_name(event.of_forward)}" if event.of_forward else f"{by} in backward"
    divides = event.operation.rstrip("_").endswith("div")
    told = [n for n in event.scalars if not math.isfinite(n) or (divides and not n)]
    took = " and ".join([*(facts.text for facts in event.took), *(f"the number {number:g}" for number in told)])
    affects = f"; it affects {list_samples(samples)} of batch {batch_idx}" if samples else ""
    return f"The first bad value was made by {by} in {where}{f', from {took}' if took else ''}{affects}."
