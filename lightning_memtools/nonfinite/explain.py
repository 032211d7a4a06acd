"""Explains a bad step: runs it again, traces its bad values to their root, and tests the samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from lightning_memtools._torch import has_accumulation_hook, is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors, plain_name, tensors_in_attributes
from lightning_memtools.nonfinite.bad_step import (
    ADVICE,
    BadStep,
    NonFiniteCause,
    advice_for,
    already_bad,
    public_name,
    rates_as_text,
    what_grew,
)
from lightning_memtools.nonfinite.finite_checks import BadInput, find_bad, list_samples, n_samples_of
from lightning_memtools.nonfinite.operation_trace import BadOperation, OperationTrace, StorageKeys
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, StepOutcome, StepRerun, digests_of
from lightning_memtools.reporting.phrases import first_of

# The class of cause, the evidence, and what to do.
Finding = tuple[NonFiniteCause, str, str]


def run_again(bad: BadStep, rerun: StepRerun, *, explains: bool) -> dict[str, str]:
    """Run a bad step again, store the results in `bad`, and return gradient hashes. With `explains`, find the cause."""
    digests: dict[str, str] = {}
    with rerun:
        try:
            plain = rerun.run()
            digests, bad.is_bad_alone = digests_of(plain.gradients), not plain.is_finite
            bad.unrestored = tuple(dict.fromkeys([*bad.unrestored, *rerun.written]))
            if bad.unrestored:
                names = first_of(bad.unrestored)
                bad.doubts = (f"The step writes {names}, without a copy: a rerun begins with what it has written.",)
            if any(micro.updates_before for micro in rerun.micro):
                text = "Earlier updates of the same batch were made before the step: a rerun begins after them."
                bad.doubts = (*bad.doubts, text)
            bad.why_no_operation = "" if explains else "not asked for (explain=False)"
            if explains:
                explain(rerun, plain, bad)
        except CannotRerunError as error:
            bad.why_no_operation = f"not found: {error}"
    return digests


def explain(rerun: StepRerun, plain: StepOutcome, bad: BadStep) -> None:
    """Find the operation that made the first NaN or Inf of a step. Record this operation and the cause in `bad`.

    `plain` is the outcome of a rerun in which no operations were recorded. CannotRerunError is raised if the step
    cannot be run again, or if no operation is found.
    """
    if plain.is_finite:
        _not_reproducible(rerun, bad)
        return
    rerun.reset()
    trace = OperationTrace(rerun.module)
    leaves = prior_tensors(rerun, trace.memory)  # before the step can replace these tensors
    traced = rerun.run(within=trace.watching())
    bad_memory = _bad_memory(traced, trace.memory)
    root = find_bad_value_root(trace.events, bad_memory, leaves)
    if root is None:
        raise CannotRerunError(
            "its NaN or Inf could not be followed to an operation (compiled or custom kernels may hide them)"
        )
    if root.leaf and root.leaf.name in rerun.written and any(map(has_accumulation_hook, rerun.module.parameters())):
        if not bad.dirty:
            bad.cause, bad.advice = NonFiniteCause.UNKNOWN, ADVICE["unknown"]
            bad.because = "hooks update weights during the backward pass, so this step itself may have made them NaN."
        raise CannotRerunError(" ".join([*bad.doubts, "Hooks update weights during its backward pass"]))
    position, event = _position_of_bad(traced, rerun, root), root.event
    micro = rerun.micro[position]
    has_good_loss = bool(traced.losses) and all(map(math.isfinite, map(float, traced.losses)))
    is_late_mask = has_good_loss or are_masked(trace.events, bad_memory, leaves)
    bad.cause, because, bad.advice = _classified(root, rerun, position, bad, is_late_mask=is_late_mask)
    bad.because = f"{because}."
    is_of_samples = bad.cause not in {NonFiniteCause.LATE_MASK, NonFiniteCause.BAD_PARAMETER}
    if is_of_samples and not (root.leaf and root.is_benign):
        bad.samples = _samples_of(root, rerun, position)
    changed = with_other_samples(micro.batch, bad.samples)
    if changed is not None:
        # A tensor may be as long as the batch for another reason: then this step is still bad.
        tried = f"with sample {changed[1]} in the place of {list_samples(bad.samples)} the step is finite"
        with suppress(CannotRerunError):
            bad.confirmed = tried if rerun.run(batches={position: changed[0]}).is_finite else ""
        bad.samples = bad.samples if bad.confirmed else ()
    bad.what = describe_root(root, type(rerun.module), bad.samples, micro.index)
    bad.operation, bad.backward, bad.module = event.of_forward or event.operation, event.backward, event.module
    bad.file, bad.line = (None, None) if event.place is None else (event.place.file, event.place.line)


def _not_reproducible(rerun: StepRerun, bad: BadStep) -> None:
    if bad.doubts:
        raise CannotRerunError(f"run again it was finite, but it could not be run exactly: {' '.join(bad.doubts)}")
    if not rerun.run().is_finite:
        raise CannotRerunError("run again it was finite once and bad once: the step itself is not deterministic")
    bad.cause, bad.advice = NonFiniteCause.NOT_REPRODUCIBLE, ADVICE["not reproducible"]
    bad.what = "No operation gives NaN or Inf when the step is run again."
    bad.because = "the same weights, batch and random numbers gave a finite loss and finite gradients, twice."


def _bad_memory(outcome: StepOutcome, memory: StorageKeys) -> list[int]:
    """Return the storage key of the first bad loss. If all losses are finite, return the keys of all bad gradients."""
    bad_losses = [loss for loss in outcome.losses if not math.isfinite(float(loss))]
    names = {bad.name for bad in find_bad(outcome.gradients.items())}
    bad: Sequence[Tensor] = bad_losses[:1] or [g for name, g in outcome.gradients.items() if name in names]
    return [key for tensor in bad if (key := memory.key(tensor)) is not None]


def _position_of_bad(outcome: StepOutcome, rerun: StepRerun, root: BadValueRoot) -> int:
    """Return the position of the first micro-batch with a bad loss (or bad data, if it is the root), else the last."""
    last = len(rerun.micro) - 1
    if len(outcome.losses) != len(rerun.micro):
        return last
    bad = [i for i, loss in enumerate(outcome.losses) if not math.isfinite(float(loss))]
    if root.leaf is not None and root.leaf.origin == "batch":
        bad += [i for i, micro in enumerate(rerun.micro) if any(not each.is_mask for each in micro.bad_inputs())]
    return bad[0] if bad else last


def _classified(root: BadValueRoot, rerun: StepRerun, position: int, bad: BadStep, *, is_late_mask: bool) -> Finding:
    event, leaf, grown = root.event, root.leaf, what_grew(bad)
    if leaf is not None and leaf.origin == "batch":
        return _of_batch(root, leaf.name, rerun.micro[position].bad_inputs(), is_late_mask=is_late_mask)
    if grown and (leaf is not None or event.finite_when_wide):
        because = f"{grown}, until the value was too large for its type"
        return NonFiniteCause.EXPLODING, because, ADVICE["exploding"].format(rates=rates_as_text(bad.learning_rates))
    if leaf is not None:
        return NonFiniteCause.BAD_PARAMETER, *_of_prior_tensor(leaf, rerun, bad)
    if event.finite_when_wide:  # the same operation, on the same values, is finite in float64
        because = f"{bad.scaler}; " if bad.scaler else ""
        because += "the operation is defined at its inputs (in float64 it is finite), but its result is too large"
        if {"float16", "bfloat16"} & {each.dtype for each in event.gave}:
            because += " for a 16-bit type (float16 ends at 65504)"
            return NonFiniteCause.LOW_PRECISION, because, ADVICE["low precision"]
        return NonFiniteCause.OVERFLOW, because, advice_for(event.operation, event.of_forward, overflows=True)
    because, advice = "the code itself writes it", ADVICE["constant"]
    if not event.constant:
        because = "the operation is undefined or infinite at its inputs"
        advice = advice_for(event.operation, event.of_forward, overflows=False)
    return NonFiniteCause.DOMAIN, because, advice


def _of_batch(root: BadValueRoot, name: str, inputs: Sequence[BadInput], *, is_late_mask: bool) -> Finding:
    """Return cause, evidence and advice for NaN or Inf in the batch tensor `name`, which may be masked too late."""
    if root.is_benign:  # nothing else is bad
        return NonFiniteCause.DOMAIN, f"{name} holds -Inf, as masks do, and it reaches the loss", ADVICE["mask"]
    its = "; ".join(str(each) for each in inputs if each.name == name) or "; ".join(map(str, inputs))
    if is_late_mask and any(each.n_nan for each in inputs):
        because = f"{its}, and {public_name(root.event.operation)} computes with it before its NaN is masked"
        return NonFiniteCause.LATE_MASK, because, ADVICE["late mask"]
    return NonFiniteCause.DIRTY_DATA, its, ADVICE["dirty data"]


def _of_prior_tensor(leaf: PriorTensor, rerun: StepRerun, bad: BadStep) -> tuple[str, str]:
    """Return evidence and advice for a tensor that already held NaN or Inf when the step began."""
    if leaf.origin == "elsewhere":
        because = "a tensor that belongs neither to the module nor to the batch held NaN or Inf"
        return because, ADVICE["bad tensor from elsewhere"]
    if leaf.origin == "attribute" or leaf.name in rerun.written:
        writes = ", and the step writes it" if leaf.name in rerun.written else ""
        because = f"{leaf.origin} {leaf.name} is no buffer{writes}: it held NaN or Inf when the step began"
        return because, ADVICE["bad attribute"].format(name=leaf.name)
    tensors = [each for each in bad.before if each.name == leaf.name]
    return already_bad(bad, str(tensors[0] if tensors else leaf.name)), bad.suspects[1] or ADVICE["bad weights"]


def with_other_samples(batch: Any, samples: Sequence[int]) -> tuple[Any, int] | None:
    """Return (copy of the batch with `samples` replaced by a good sample, index of that sample); None if impossible."""
    bad = set(samples)
    good = next((index for index in range(n_samples_of(batch) or 0) if index not in bad), None)
    if good is None or not bad:
        return None

    def change(tensor: Tensor) -> Tensor:
        if not is_in_memory(tensor) or not tensor.dim():
            return tensor
        changed = tensor.detach().clone()
        changed[list(bad)] = changed[good].clone()
        return changed.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change), good


def _samples_of(root: BadValueRoot, rerun: StepRerun, position: int) -> tuple[int, ...]:
    """Return the indices of the bad samples in the micro-batch at `position`; () if they cannot be identified."""
    micro = rerun.micro[position]
    if (n_samples := n_samples_of(micro.batch)) is None:
        return ()
    for facts in (*root.event.gave, *root.event.took):
        if facts.shape[:1] == (n_samples,) and facts.samples:
            return facts.samples
    name = root.leaf.name if root.leaf is not None and root.leaf.origin == "batch" else None
    return next((bad.samples for bad in micro.bad_inputs() if bad.name == name), ())


# --- the way back from a bad loss or gradient, through bad values only, to the operation that made the first one


@dataclass(frozen=True, slots=True)
class PriorTensor:
    """A tensor that existed before the step: its kind, its name, and whether Inf in it may be intended."""

    origin: Literal["batch", "parameter", "buffer", "attribute", "elsewhere"]  # the kind of tensor
    name: str
    may_be_infinite: bool  # whether infinities in it are intended, as in masks and bounds


UNKNOWN = PriorTensor("elsewhere", "a tensor from elsewhere", may_be_infinite=True)

Leaves = Mapping[int, PriorTensor]
"""The tensors that existed before a step, by the key of their storage."""


def prior_tensors(rerun: StepRerun, memory: StorageKeys) -> Leaves:
    """Return the tensors that exist before a step: weights, buffers, attributes and batches."""
    found: list[tuple[Tensor, PriorTensor]] = []
    for name, tensor in tensors_in_attributes(rerun.module):
        found.append((tensor, PriorTensor("attribute", name, may_be_infinite=True)))
    for name, buffer in rerun.module.named_buffers():
        found.append((buffer, PriorTensor("buffer", plain_name(name), may_be_infinite=True)))
    for name, parameter in rerun.module.named_parameters():
        leaf = PriorTensor("parameter", plain_name(name), may_be_infinite=not parameter.requires_grad)
        found.append((parameter, leaf))
    for micro in rerun.micro:
        masks = {bad.name for bad in micro.bad_inputs() if bad.is_mask}  # where they are used as masks are
        for name, tensor in named_tensors(micro.batch, "batch"):
            found.append((tensor, PriorTensor("batch", name, may_be_infinite=name in masks)))
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
        return self.event.constant and not any(self.event.outputs.values())  # no NaN


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
        later = events[event.number + 1 :]
        user = next((each for each in later if event.outputs.keys() & each.inputs.keys()), None)
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
    """Trace NaN and Inf in the storages `start` back. Return where they first appeared and what turned Inf into NaN."""
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
            if key not in leaves and event.operation in {"aten.fill_", "aten.index_put_"}:
                # No operator makes the tensor of a number that code writes, as in x[0] = nan.
                roots.append(BadValueRoot(replace(event, constant=True)))
                continue
            leaf, user = leaves.get(key, UNKNOWN), _first_use(events, event)
            is_batch = leaf.origin == "batch"
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
        what = leaf.name if leaf.origin == "elsewhere" else f"{leaf.origin} {leaf.name}"
        if leaf.origin == "batch":
            what = "the batch" if leaf.name == "batch" else leaf.name
        return f"The first bad value was in {what}, first used by {by} in {where}."
    if event.backward:
        by = f"{by} in the backward of {public_name(event.of_forward)}" if event.of_forward else f"{by} in backward"
    divides = event.operation.rstrip("_").endswith("div")
    told = [n for n in event.scalars if not math.isfinite(n) or (divides and not n)]
    took = " and ".join([*(facts.text for facts in event.took), *(f"the number {number:g}" for number in told)])
    affects = f"; it affects {list_samples(samples)} of batch {batch_idx}" if samples else ""
    return f"The first bad value was made by {by} in {where}{f', from {took}' if took else ''}{affects}."
