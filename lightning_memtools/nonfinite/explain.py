"""Explains a bad step: runs it again, traces its bad values to their root, and tests the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.nonfinite.bad_step import BadStep, already_bad, what_grew
from lightning_memtools.nonfinite.bad_value_roots import (
    BadValueRoot,
    PriorTensor,
    PriorTensors,
    ValueOrigin,
    describe_root,
    find_bad_value_root,
)
from lightning_memtools.nonfinite.causes import (
    ADVICE,
    NonFiniteCause,
    advice_for,
    rates_as_text,
)
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.guarded_step import bad_inputs, list_samples
from lightning_memtools.nonfinite.operation_trace import OperationTrace, StorageKeys
from lightning_memtools.nonfinite.step_rerun import (
    CannotRerunError,
    StepOutcome,
    StepRerun,
    digests_of,
    doubts_about,
    mismatches,
)
from lightning_memtools.reporting.phrases import first_of

_NARROW = {"float16", "bfloat16"}


def run_again(bad: BadStep, rerun: StepRerun, *, explains: bool) -> dict[str, str]:
    """Run a bad step again, write into `bad` what that shows, and return the digests of its gradients.

    Args:
        bad: The bad step.
        rerun: The step to run.
        explains: Whether to look for the cause.
    """
    digests: dict[str, str] = {}
    doubts = doubts_about(rerun.micro, bad.unrestored)  # before restoring writes the batches
    with rerun:
        try:
            plain = rerun.run()
            digests, bad.is_bad_alone = digests_of(plain.gradients), not plain.is_finite
            if rerun.written:
                doubts.append(
                    f"The step writes {first_of(rerun.written)}, which is no buffer: a rerun begins with what it has "
                    "written (register_buffer keeps the values before the step)."
                )
            bad.doubts = tuple(doubts)
            bad.unrestored = tuple(dict.fromkeys([*bad.unrestored, *rerun.written]))
            differences = mismatches([loss for _, loss in bad.losses], digests, plain)
            if differences:
                why = " ".join((*differences, *bad.doubts))
                bad.again = f"Run again in the training process, the step was not the same. {why}"
            else:
                bad.again = "losses are the same bit for bit."
            if explains:
                explain(rerun, plain, bad)
            else:
                bad.why_no_operation = "not asked for (explain=False)"
        except CannotRerunError as error:
            bad.why_no_operation = f"not found: {error}"
    if bad.cause is NonFiniteCause.NOT_REPRODUCIBLE:
        bad.again = ""
    return digests


def explain(rerun: StepRerun, plain: StepOutcome, bad: BadStep) -> None:
    """Find the operation that made the first bad value of a step, and write it and its cause into `bad`.

    Args:
        rerun: The step, entered.
        plain: What it gave when it was run again.
        bad: The bad step.

    Raises:
        CannotRerunError: The step cannot be run again, or what is bad cannot be traced; the message says why.
    """
    if plain.is_finite:
        _not_reproducible(rerun, bad)
        return
    trace = OperationTrace(rerun.module)
    rerun.reset()
    leaves = PriorTensors(rerun, trace.memory)  # before the step can replace these tensors
    traced = rerun.run(within=trace.watching())
    root = find_bad_value_root(trace.events, _bad_memory(traced, trace.memory), leaves)
    if root is None:
        raise CannotRerunError(
            "its NaN or Inf could not be followed to an operation (compiled or custom kernels may hide them)"
        )
    position = _position_of_bad(traced, rerun)
    samples = _samples_of(root, rerun, position)
    event, micro = root.event, rerun.micro[position]
    bad.cause, bad.because, bad.advice = _classified(root, rerun, position, bad)
    bad.because = f"{bad.because}."
    changed = with_other_samples(micro.batch, samples)
    if changed is not None and bad.cause in {NonFiniteCause.DOMAIN, NonFiniteCause.DIRTY_DATA}:
        outcome = "finite" if _is_finite(rerun, position, changed[0]) else "bad too"
        bad.confirmed = f"with sample {changed[1]} in the place of {list_samples(samples)} the step is {outcome}"
    bad.what = describe_root(root, type(rerun.module).__name__, samples, micro.index)
    bad.operation, bad.backward, bad.module = event.of_forward or event.operation, event.backward, event.module
    bad.file, bad.line = (None, None) if event.place is None else (event.place.file, event.place.line)
    bad.samples, bad.batch_idx = samples, micro.index


def _not_reproducible(rerun: StepRerun, bad: BadStep) -> None:
    if bad.doubts:
        raise CannotRerunError(f"run again it was finite, but it could not be run exactly: {' '.join(bad.doubts)}")
    if not rerun.run().is_finite:
        raise CannotRerunError("run again it was finite once and bad once: the step itself is not deterministic")
    bad.cause, bad.advice = NonFiniteCause.NOT_REPRODUCIBLE, ADVICE["not reproducible"]
    bad.what = "No operation gives NaN or Inf when the step is run again."
    bad.because = "the same weights, batch and random numbers gave a finite loss and finite gradients, twice."


def _bad_memory(outcome: StepOutcome, memory: StorageKeys) -> list[int]:
    """Return the keys of the first bad loss; of all bad gradients where every loss is good."""
    bad_losses = [loss for loss in outcome.losses if not math.isfinite(float(loss))]
    names = {bad.name for bad in find_bad(outcome.gradients.items())}
    bad: Sequence[Tensor] = bad_losses[:1] or [g for name, g in outcome.gradients.items() if name in names]
    return [key for tensor in bad if (key := memory.key(tensor)) is not None]


def _position_of_bad(outcome: StepOutcome, rerun: StepRerun) -> int:
    """Return the position of the first micro-batch with a bad loss; the last where every loss is good."""
    last = len(rerun.micro) - 1
    if len(outcome.losses) != len(rerun.micro):
        return last
    return next((i for i, loss in enumerate(outcome.losses) if not math.isfinite(float(loss))), last)


def _classified(root: BadValueRoot, rerun: StepRerun, position: int, bad: BadStep) -> tuple[NonFiniteCause, str, str]:
    """Return the class of cause, the evidence, and what to do."""
    event, leaf, grown = root.event, root.leaf, what_grew(bad)
    rates = rates_as_text(bad.learning_rates)
    overflows = event.finite_when_wide is True  # the same operation, on the same values, is finite in float64
    if leaf is not None and leaf.origin is ValueOrigin.BATCH:
        inputs = "; ".join(str(each) for each in bad_inputs(rerun.micro[position]) if not each.is_mask)
        return NonFiniteCause.DIRTY_DATA, inputs, ADVICE["dirty data"]
    if grown and (leaf is not None or overflows):
        because = f"{grown}, until the value was too large for its type"
        return NonFiniteCause.EXPLODING, because, ADVICE["exploding"].format(rates=rates)
    if leaf is not None:
        return NonFiniteCause.BAD_PARAMETER, *_of_prior_tensor(leaf, rerun, bad)
    if overflows:
        is_narrow = bool(_NARROW & {each.dtype for each in event.gave})
        cause = NonFiniteCause.LOW_PRECISION if is_narrow else NonFiniteCause.OVERFLOW
        because = f"{bad.scaler}; " if bad.scaler else ""
        because += "the operation is defined at its inputs (in float64 it is finite), but its result is too large"
        if is_narrow:
            return cause, f"{because} for a 16-bit type (float16 ends at 65504)", ADVICE["low precision"]
        return cause, because, advice_for(event.operation, event.of_forward, overflows=True)
    because = "the code itself writes it" if event.constant else "the operation is undefined or infinite at its inputs"
    advice = ADVICE["constant"] if event.constant else advice_for(event.operation, event.of_forward, overflows=False)
    return NonFiniteCause.DOMAIN, because, advice


def _of_prior_tensor(leaf: PriorTensor, rerun: StepRerun, bad: BadStep) -> tuple[str, str]:
    """Return the evidence, and what to do, where a tensor held the bad value when the step began."""
    if leaf.origin is ValueOrigin.ELSEWHERE:
        because = "a tensor that belongs neither to the module nor to the batch held NaN or Inf"
        return because, ADVICE["bad tensor from elsewhere"]
    if leaf.origin is ValueOrigin.ATTRIBUTE or leaf.name in rerun.written:
        because = f"{leaf.origin} {leaf.name} is no buffer, and the step writes it" if leaf.name in rerun.written else (
            f"attribute {leaf.name}, a tensor that is no buffer"
        )  # fmt: skip
        because += ": it held NaN or Inf, as this step or an earlier one left it"
        return because, ADVICE["bad attribute"].format(name=leaf.name)
    tensors = [each for each in bad.parameters if each.name == leaf.name]
    return already_bad(bad, str(tensors[0]) if tensors else leaf.name), ADVICE["bad weights"]


def n_samples_of(batch: Any) -> int | None:
    """Return the length of dimension 0 that the batch's tensors share; None where they differ or have none."""
    lengths = {tensor.shape[0] for tensor in tensors_in(batch) if is_in_memory(tensor) and tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def with_other_samples(batch: Any, samples: Sequence[int]) -> tuple[Any, int] | None:
    """Return the batch with a good sample in the place of some, and that sample's index; None if none is good."""
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


def _is_finite(rerun: StepRerun, position: int, batch: Any) -> bool:
    try:
        return rerun.run(batches={position: batch}).is_finite
    except CannotRerunError:
        return False


def _samples_of(root: BadValueRoot, rerun: StepRerun, position: int) -> tuple[int, ...]:
    """Return the affected samples, where dimension 0 of the operation's outputs or inputs is that of the batch."""
    micro = rerun.micro[position]
    n_samples = n_samples_of(micro.batch)
    for values in (*root.event.gave, *root.event.took):
        if values.shape[:1] == (n_samples,) and values.samples:
            return values.samples if _are_samples(values.samples, rerun, position) else ()
    if root.leaf is not None and root.leaf.origin is ValueOrigin.BATCH:
        return next((bad.samples for bad in bad_inputs(micro) if bad.name == root.leaf.name), ())
    return ()


def _are_samples(positions: Sequence[int], rerun: StepRerun, position: int) -> bool:
    """Return whether positions in a tensor as long as the batch are samples: it may be as long as a layer is wide.

    Where a weight or buffer is of that length too, the step must be finite without those samples.
    """
    batch = rerun.micro[position].batch
    n_samples = n_samples_of(batch)
    tensors = [*rerun.module.parameters(), *rerun.module.buffers()]
    if all(n_samples not in tensor.shape for tensor in tensors if not is_lazy(tensor)):
        return True
    changed = with_other_samples(batch, positions)
    return changed is not None and _is_finite(rerun, position, changed[0])
