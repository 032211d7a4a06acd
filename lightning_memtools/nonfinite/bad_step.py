"""One optimizer step until it is decided, what is known of a bad one afterwards, and the history of the last steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.nonfinite.finite_checks import BadTensor, GradientTraces
from lightning_memtools.nonfinite.micro_batches import BadInput, MicroBatch
from lightning_memtools.state.update_start import UpdateStart

UPDATE_OVERFLOWED = "the update itself overflowed"
"""Says in `BadStep.update` that neither a setting nor a hook is to blame, but the size of the update."""


@dataclass(slots=True, eq=False)
class GuardedStep:
    """One optimizer step, from its first micro-batch to the update.

    Attributes:
        number: The training step, counted as the x axis of the logs counts.
        restore_loop: Puts the caller's counters back to the start of this step; None while that is not known yet.
        micro: Its micro-batches, oldest first.
        optimizer: The optimizer that makes the update, once that is known.
        parameters: The parameters with a gradient.
        start: What its update began with; only where the step is decided late.
        written: The parameters and attributes that its forward passes wrote, and that cannot be restored.
        copies: The same with copies, to undo the update; None where none are kept.
        traces: The gradients, for as long as they exist; only where the step is decided late.
    """

    number: int
    restore_loop: Callable[[], None] | None
    micro: list[MicroBatch] = field(default_factory=list)
    optimizer: Optimizer | None = None
    parameters: Sequence[Tensor] = ()
    start: UpdateStart | None = None
    written: tuple[str, ...] = ()
    copies: UpdateStart | None = None
    traces: GradientTraces | None = None

    def losses(self) -> list[Tensor]:
        """Return the losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose update must not be made.

    Attributes:
        step: The step, with those of its batches that are still held.
        losses: Its losses on this rank, in the order of `step.losses()`.
        norm: The norm over all its gradients.
        gradients: The bad gradients.
        late: Whether the update was held back on the device and the host learned of it afterwards.
        scaler: Says what the gradient scaler did, where that is the reason; else empty.
        later: The steps that were held back after it, because the host did not know of it yet.
        update: Says what made the update bad although losses and gradients were finite; else empty.
        applied: Whether the update was made before it was found to be bad.
    """

    step: GuardedStep
    losses: tuple[float, ...]
    norm: float
    gradients: tuple[BadTensor, ...]
    late: bool
    scaler: str = ""
    later: tuple[GuardedStep, ...] = ()
    update: str = ""
    applied: bool = False

    @property
    def is_lost(self) -> bool:
        """True if the update was made and cannot be undone."""
        return self.applied and self.step.copies is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts that one rank knows about a bad step. Plain values: they are sent to the other ranks.

    Attributes:
        rank: The rank.
        step: The training step.
        batches: The batch indices of its micro-batches.
        losses: (batch index, loss) for each loss of the step.
        norm: The norm over all gradients.
        gradients: The bad gradients.
        parameters: Parameters that were bad before the step, and buffers that held NaN.
        inputs: Tensors of the batches that hold NaN or Inf.
        unseen: The indices of the batches that were no longer held.
        learning_rates: The learning rates of the parameter groups.
        weight_norm: The L2 norm of the parameters that have a gradient.
        plain_sgd: Whether an update is the learning rate times the gradient.
        float16: Whether float16 values take part.
        scaler: Says what the gradient scaler did, where that is the reason.
        late: Whether the step was decided late.
        unrestored: The names of buffers, parameters and attributes that could not be restored.
        carried: Whether the gradients were made NaN to tell the other ranks of this rank's bad loss.
        update: Says what made the update bad although losses and gradients were finite; else empty.
        is_lost: Whether that update was made, and could not be undone.
    """

    rank: int
    step: int
    batches: tuple[int, ...]
    losses: tuple[tuple[int, float], ...]
    norm: float
    gradients: tuple[BadTensor, ...]
    parameters: tuple[BadTensor, ...]
    inputs: tuple[BadInput, ...]
    unseen: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_norm: float
    plain_sgd: bool
    float16: bool
    scaler: str = ""
    late: bool = False
    unrestored: tuple[str, ...] = ()
    carried: bool = False
    update: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step in the history.

    Attributes:
        step: The training step.
        loss: The mean of the step's losses on this rank; NaN if it had none.
        norm: The L2 norm of all gradients, before clipping.
    """

    step: int
    loss: float
    norm: float


def growth(values: Sequence[float]) -> float | None:
    """Return the last finite value divided by the median of the first half; None for fewer than two finite values."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if len(finite) < 2:  # noqa: PLR2004, growth takes two values
        return None
    start = median(finite[: len(finite) // 2])
    return finite[-1] / start if start > 0 else None


def undivided_loss(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """Return a loss as training_step returned it, 0-dim.

    Args:
        loss: The loss as it goes backward: divided for an accumulation, and multiplied by a gradient scaler.
        divided_by: The number it was divided by.
        scale: The number it was multiplied by; None without a scaler.
    """
    value = loss.detach()
    if divided_by == 1 and scale is None and value.dtype == torch.float32 and value.dim() == 0:
        return value
    # A float64 loss may be finite beyond float32's range.
    value = (value if value.dtype == torch.float64 else value.float()) * divided_by
    if scale is not None:
        value = value / scale
    return value if value.dim() == 0 else value.mean()
