"""Explains a bad step: runs it again, traces its bad values to their root, and tests the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools._torch import is_in_memory
from lightning_memtools.nonfinite.cause.bad_value_roots import (
    BadValueRoot,
    PriorTensors,
    ValueOrigin,
    find_bad_value_root,
)
from lightning_memtools.nonfinite.cause.classifier import Classifier
from lightning_memtools.nonfinite.cause.operation_trace import OperationTrace, StorageKeys
from lightning_memtools.nonfinite.cause.reread_tensors import tensors_read_again
from lightning_memtools.nonfinite.causes import ADVICE, Explanation, KnownOfStep, NonFiniteCause
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.step_outcome import StepOutcome
from lightning_memtools.nonfinite.step_rerun import CannotRerunError, StepRerun
from lightning_memtools.nonfinite.tensor_names import tensors_in_attributes
from lightning_memtools.reporting.phrases import first_of


def explain(rerun: StepRerun, plain: StepOutcome, background: KnownOfStep) -> Explanation:
    """Return the operation that made the first bad value of a step, and its cause.

    Args:
        rerun: The step, entered.
        plain: The outcome of the step when it was run again.
        background: The facts that are known of it already.

    Raises:
        CannotRerunError: The step cannot be run again, or what is bad cannot be traced; the message says why.
    """
    if plain.is_finite:
        return _not_reproducible(rerun, background)
    trace, traced, root = _traced(rerun)
    tried = []
    if root is not None and root.leaf is not None and root.leaf.origin is ValueOrigin.ATTRIBUTE:
        # The tensor is as the step left it, not as the step found it: it may be the cause or a result of the bad step.
        rerun.prepare = lambda: _fill_attributes(rerun.module)
        is_finite = rerun.run().is_finite
        tried.append(
            f"with 0 in the place of NaN in {root.leaf.name} the step is {'finite' if is_finite else 'bad too'}"
        )
        if not is_finite:
            trace, traced, root = _traced(rerun)
    if root is None:
        raise CannotRerunError(
            "its NaN or Inf could not be followed to an operation (compiled or custom kernels may hide them)"
        )
    position = _position_of_bad(traced, rerun)
    return Classifier(rerun, background, trace, root, position, plain, tried).explanation()


def _traced(rerun: StepRerun) -> tuple[OperationTrace, StepOutcome, BadValueRoot | None]:
    trace = OperationTrace(rerun.module)
    rerun.reset()
    leaves = PriorTensors(rerun, trace.memory)  # before the step can replace these tensors
    traced = rerun.run(within=trace.watching())
    return trace, traced, find_bad_value_root(trace.events, _bad_memory(traced, trace.memory), leaves)


@torch.no_grad()
def _fill_attributes(module: Module) -> None:
    for _, tensor in tensors_in_attributes(module):
        if tensor.is_floating_point() and is_in_memory(tensor):
            tensor.detach().nan_to_num_(0.0, torch.inf, -torch.inf)


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


def _not_reproducible(rerun: StepRerun, background: KnownOfStep) -> Explanation:
    if background.doubts:
        raise CannotRerunError(
            f"run again it was finite, but it could not be run exactly: {' '.join(background.doubts)}"
        )
    read = tensors_read_again(rerun, background.unchanged, background.restored)
    if not read.is_finite:
        raise CannotRerunError("run again it was finite once and bad once: the step itself is not deterministic")
    because = "the same weights, batch and random numbers gave a finite loss and finite gradients, twice"
    changed = [*background.changed, *read.others]
    if changed:
        because += f"; the rerun began with these as the step had left them: {first_of(changed, 5)}"
    else:
        because += f"; all {read.n_same} tensors that it reads are proved to be the same, by digests of their bits"
    return Explanation(
        cause=NonFiniteCause.NOT_REPRODUCIBLE,
        what="No operation gives NaN or Inf when the step is run again.",
        because=because,
        confirmed="",
        advice=ADVICE["not reproducible, changed" if changed else "not reproducible"],
    )
