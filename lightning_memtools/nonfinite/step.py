"""What is known of one optimizer step until its verdict is in, and what a bad one leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.nonfinite.batches import BadInput, MicroBatch
from lightning_memtools.nonfinite.confirm import BadTensor
from lightning_memtools.nonfinite.optimizers import StateKeys
from lightning_memtools.nonfinite.traces import GradientTraces


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
