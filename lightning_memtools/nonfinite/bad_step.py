"""What is known of one optimizer step until it is decided, and of a bad one afterwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.nonfinite.finite_checks import BadTensor, GradientTraces
from lightning_memtools.nonfinite.micro_batches import BadInput, MicroBatch
from lightning_memtools.nonfinite.update_veto import StateKeys


@dataclass(slots=True, eq=False)
class Step:
    """One optimizer step, from its first micro-batch to the update.

    Attributes:
        number: The training step, counted as the x axis of the logs counts.
        mark: Whatever the caller needs to turn back the training loop to the start of this step.
        micro: Its micro-batches, oldest first.
        optimizer: Whose update it is, once that is known.
        parameters: Those with a gradient.
        keys: Which state the optimizer had before the update.
        settings: The optimizer's learning rates and other settings at the update.
        traces: Its gradients, as long as they are there; only where the step is read late.
    """

    number: int
    mark: object
    micro: list[MicroBatch] = field(default_factory=list)
    optimizer: Optimizer | None = None
    parameters: Sequence[Tensor] = ()
    keys: StateKeys | None = None
    settings: list[dict[str, Any]] | None = None
    traces: GradientTraces | None = None

    def losses(self) -> list[Tensor]:
        """The losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(frozen=True, slots=True)
class Trip:
    """A step that must not be taken.

    Attributes:
        step: The step; its batches are still held as far as memory allows.
        losses: Its losses on this rank, in the order of `step.losses()`.
        norm: The norm over all its gradients.
        gradients: The bad gradients.
        late: Whether the update was held back on the device and the host learned of it afterwards.
        scaler: What the gradient scaler did, where that is the reason; else empty.
        later: The steps that were held back after it, because the host did not know of it yet.
    """

    step: Step
    losses: tuple[float, ...]
    norm: float
    gradients: tuple[BadTensor, ...]
    late: bool
    scaler: str = ""
    later: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank found out about a trip. Plain values: it travels between ranks.

    Attributes:
        rank: Which rank.
        step: The training step.
        batches: The batch indices of its micro-batches.
        losses: (batch index, loss) for each loss of the step.
        norm: The norm over all gradients.
        gradients: The bad gradients.
        parameters: Parameters that were bad before the step, and buffers that held NaN.
        inputs: Tensors of the batches that hold NaN or Inf.
        unseen: Batches that could not be looked at any more.
        learning_rates: Those of the parameter groups.
        weight_norm: The L2 norm of the parameters that have a gradient.
        plain_sgd: Whether an update is the learning rate times the gradient.
        float16: Whether half precision takes part.
        scaler: What the gradient scaler did, where that is the reason.
        late: Whether the step was read late.
        unkept: Buffers that could not be put back.
        carried: Whether the gradients were made NaN to carry this rank's bad loss to the others.
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
    unkept: tuple[str, ...] = ()
    carried: bool = False


LENGTH = 20


@dataclass(frozen=True, slots=True)
class Past:
    """A step as the history keeps it.

    Attributes:
        step: The training step.
        loss: The mean of the step's losses on this rank; NaN where there was none.
        norm: The L2 norm of all gradients, before clipping.
    """

    step: int
    loss: float
    norm: float


class History(deque[Past]):
    """The last 20 steps, oldest first."""

    def __init__(self) -> None:
        super().__init__(maxlen=LENGTH)

    def losses(self) -> list[float]:
        """Their losses."""
        return [past.loss for past in self]

    def norms(self) -> list[float]:
        """Their gradient norms."""
        return [past.norm for past in self]


def growth(values: Sequence[float]) -> float | None:
    """How many times larger the last finite value is than the median of the first half; None for fewer than two."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if len(finite) < 2:  # noqa: PLR2004, growth is between two values
        return None
    start = median(finite[: len(finite) // 2])
    return finite[-1] / start if start > 0 else None


@torch.no_grad()
def noted(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """The value of a loss that was divided for an accumulation and multiplied by a gradient scaler's scale, 0-dim."""
    value = loss.detach()
    # A float64 loss may be finite beyond float32's range.
    value = (value if value.dtype == torch.float64 else value.float()) * divided_by
    if scale is not None:
        value = value / scale
    return value if value.dim() == 0 else value.mean()
