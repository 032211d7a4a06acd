"""Follows a bad loss or gradient backwards, through bad values only, to the operation that made the first bad value."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

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


Leaves = Mapping[int, PriorTensor]
"""The tensors that existed before a step, by the key of their storage."""


def prior_tensors(rerun: StepRerun, memory: StorageKeys) -> Leaves:
    """Return the tensors that exist before a step: weights, buffers, attributes and batches."""
    found: list[tuple[Tensor, PriorTensor]] = []
    for name, tensor in tensors_in_attributes(rerun.module):
        found.append((tensor, PriorTensor(ValueOrigin.ATTRIBUTE, name, may_be_infinite=True)))
    for name, buffer in rerun.module.named_buffers():
        found.append((buffer, PriorTensor(ValueOrigin.BUFFER, plain_name(name), may_be_infinite=True)))
    for name, parameter in rerun.module.named_parameters():
        leaf = PriorTensor(ValueOrigin.PARAMETER, plain_name(name), may_be_infinite=not parameter.requires_grad)
        found.append((parameter, leaf))
    for micro in rerun.micro:
        masks = {bad.name for bad in bad_inputs(micro) if bad.is_mask}  # where they are used as masks are
        for name, tensor in named_tensors(micro.batch, "batch"):
            found.append((tensor, PriorTensor(ValueOrigin.BATCH, name, may_be_infinite=name in masks)))
    return {key: leaf for tensor, leaf in found if (key := memory.key(tensor)) is not None}


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


def find_bad_value_root(events: Sequence[BadOperation], start: Iterable[int], leaves: Leaves) -> BadValueRoot | None:
    """Return where the NaN or Inf in the storages `start` first appeared; None if that was not recorded.

    An Inf that is intended, such as in a mask, does not count. If every Inf is intended, return the operation that
    turned Inf into NaN.

    Args:
        events: The operations with NaN or Inf in their outputs, in the order in which they ran.
        start: The keys of the storages to explain, such as the key of the loss.
        leaves: The tensors that existed before. A storage that is none of theirs, and that no operation wrote, is
            that of a tensor from elsewhere.
    """
    roots, converters = _slice_back(events, start, leaves)
    real = [root for root in roots if not root.is_benign]
    if real:
        root = min(real, key=lambda root: root.event.number)
        return root if root.leaf is None else replace(root, event=_first_use(events, root.event))
    if converters:
        return BadValueRoot(min(converters, key=lambda event: event.number))
    return min(roots, key=lambda root: root.event.number, default=None)


def are_masked(events: Sequence[BadOperation], start: Iterable[int], leaves: Leaves) -> bool:
    """Return True if the code multiplied every NaN by a zero of a mask. This does not remove NaN: NaN * 0 is NaN."""
    return not _slice_back(events, start, leaves, ends_at_masks=True)[0]


def _first_use(events: Sequence[BadOperation], event: BadOperation) -> BadOperation:
    """Return `event`, or, if it only copies its input, the first later operation that computes with the copy."""
    while event.operation in {"aten.clone", "aten._to_copy"}:
        after = events[bisect_right(events, event.number, key=lambda each: each.number) :]
        user = next((each for each in after if event.outputs.keys() & each.inputs.keys()), None)
        if user is None:
            break
        event = user
    return event


# What a mask of -inf is for. -inf in data that a layer multiplies by its weights is not meant.
_OF_MASKS = ("add", "where", "masked_fill", "softmax", "log_softmax", "logsumexp", "exp", "maximum", "minimum", "max")


def _masks(event: BadOperation) -> bool:
    name = event.operation.removeprefix("aten.").removesuffix("_")
    return name in {*_OF_MASKS, "amax", "cat", "stack", "index", "gather", "clamp"} or "attention" in name


def _slice_back(
    events: Sequence[BadOperation], start: Iterable[int], leaves: Leaves, *, ends_at_masks: bool = False
) -> tuple[list[BadValueRoot], list[BadOperation]]:
    """Trace the NaN and Inf in the storages `start` back through the operations that wrote them.

    Returns:
        The places where they first appeared, and the operations on the way that made NaN from infinities.
    """
    last, last_nan = dict[int, int](), dict[int, int]()  # storage: the operation that has written it
    writers: list[dict[int, int | None]] = []  # for each operation, the one that wrote each of its bad inputs
    for index, event in enumerate(events):
        # Later operations may have written Inf to other elements of a storage that holds NaN.
        writers.append(
            {k: last_nan.get(k, last.get(k)) if is_nan else last.get(k) for k, is_nan in event.inputs.items()}
        )
        last |= dict.fromkeys(event.outputs, index)
        last_nan |= {key: index for key, has_nan in event.outputs.items() if has_nan}
    roots, converters = list[BadValueRoot](), list[BadOperation]()
    # Of each operation, either the origin of its NaN or the origin of its infinity is wanted.
    waiting = [(last[key], events[last[key]].outputs[key]) for key in start if key in last]
    seen: set[tuple[int, bool]] = set()
    while waiting:
        index, wants_nan = waiting.pop()
        event = events[index]
        if (index, wants_nan) in seen or (ends_at_masks and event.masks):
            continue
        seen.add((index, wants_nan))
        if not event.inputs:
            roots.append(BadValueRoot(event))
        with_nan = [key for key, has_nan in event.inputs.items() if has_nan and wants_nan]
        if wants_nan and event.inputs and not with_nan:
            converters.append(event)
        for key in with_nan or event.inputs:
            writer = writers[index][key]
            if writer is not None:
                waiting.append((writer, event.inputs[key]))
                continue
            leaf, user = leaves.get(key, UNKNOWN), _first_use(events, event)
            is_batch = leaf.origin is ValueOrigin.BATCH
            is_meant = not event.inputs[key] and (not is_batch or user.backward or _masks(user))
            roots.append(BadValueRoot(event, leaf if is_meant else replace(leaf, may_be_infinite=False)))
    return roots, converters


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
