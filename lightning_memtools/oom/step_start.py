"""A step on a batch, and what it began with: to take a failed attempt at it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memtools._torch import write_count
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.nonfinite.buffer_keeper import BufferKeeper
from lightning_memtools.state.random_state import RandomState


class StepLog(Protocol):
    """The values that a step logs."""

    def save(self) -> Callable[[], None]:
        """Return the function that takes back what is logged from now on."""

    def begin_part(self, part: Any) -> None:
        """Take a part's size as the batch size of what is logged."""

    def values(self) -> dict[str, Tensor]:
        """Return the values of this step."""

    def put_mean(self, values: Sequence[dict[str, Tensor]], counts: Sequence[int]) -> None:
        """Set the values of this step to those of the whole batch."""


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A step on one batch.

    Attributes:
        batch: The batch.
        forward: Runs a batch, or a part of one, and returns the result. In training it has `closure_loss`, the tensor
            to send backward, and `extra`, a dict of outputs.
        log: What the step logs.
        backward: Sends a loss backward; None in evaluation.
        zero_grad: Takes the gradients of the step before away; None where gradients are accumulated over batches.
        skipped: Returns the result of a batch that is skipped; None where none can be.
    """

    batch: Any
    forward: Callable[[Any], Any]
    log: StepLog
    backward: Callable[[Tensor], None] | None = None
    zero_grad: Callable[[], None] | None = None
    skipped: Callable[[], Any] | None = None


class StepStart:
    """The state that a step began with, to take a failed attempt back.

    The gradients of a batch that is the first of its optimizer step are None before it; those that earlier batches have
    accumulated are set aside while parts run, so that a failed part cannot touch them.
    """

    def __init__(
        self,
        step: BatchStep,
        parameters: Sequence[nn.Parameter],
        metrics: Sequence[Metric],
        buffers: BufferKeeper | None,
    ) -> None:
        self._step = step
        self._parameters = parameters
        self._buffers = buffers
        self._is_zeroed = step.zero_grad is None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None, int]] = []
        self._random = RandomState.now()
        self._take_back_log = step.log.save()
        self._metrics = [(metric, _copied(vars(metric))) for metric in metrics]
        if buffers is not None:
            buffers.keep()
        if step.zero_grad is None and step.backward is not None:
            self._gradients = [
                (parameter, parameter.grad, -1 if parameter.grad is None else write_count(parameter.grad))
                for parameter in parameters
            ]

    def run_part(self, step: BatchStep, part: Any, weight: float) -> Any:
        """Run forward and backward of the batch or of a part."""
        result = step.forward(part)
        if step.backward is None:
            return result
        self.zero_once()
        if result.closure_loss is not None:
            step.backward(result.closure_loss if weight == 1.0 else result.closure_loss * weight)
        # What is kept of a part must not hold its graph.
        if part is step.batch:
            return result
        loss = None if result.closure_loss is None else result.closure_loss.detach()
        return replace(result, closure_loss=loss, extra=map_tensors(result.extra, torch.Tensor.detach))

    def zero_once(self) -> None:
        """Take the gradients of the step before away, once for all attempts."""
        if not self._is_zeroed and self._step.zero_grad is not None:
            self._is_zeroed = True
            self._step.zero_grad()

    def set_gradients_aside(self) -> None:
        """Take the gradients that earlier batches accumulated out of the reach of backward."""
        self._aside = [(parameter, gradient) for parameter, gradient, _ in self._gradients if gradient is not None]
        for parameter, _ in self._aside:
            parameter.grad = None

    @torch.no_grad()
    def add_gradients_set_aside(self) -> None:
        """Put the gradients back with what the parts have added."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._aside = []

    def take_back(self) -> str:
        """Restore what the step began with, and return the reason why that cannot be done, else ""."""
        self._random.restore()
        self._take_back_log()
        for metric, values in self._metrics:
            vars(metric).update(_copied(values))
        unrestored = self._buffers.unrestored() if self._buffers is not None else []
        if self._buffers is not None:
            self._buffers.restore()
        if unrestored:
            return (
                f"the step wrote {unrestored[0]}, a large buffer that no earlier step wrote, so that no copy was made"
            )
        aside = {id(parameter) for parameter, _ in self._aside}
        changed = [
            gradient
            for parameter, gradient, count in self._gradients
            if id(parameter) not in aside
            and (parameter.grad is not gradient or (gradient is not None and write_count(gradient) != count))
        ]
        if any(gradient is not None for gradient in changed):
            return (
                "its backward pass had added to gradients that earlier batches of the same optimizer step accumulated "
                "before memory ran out, and sums cannot be taken apart exactly"
            )
        if self._step.backward is not None and self._step.zero_grad is not None:
            self.zero_once()
            for parameter in self._parameters:
                parameter.grad = None
        for parameter, gradient, _ in self._gradients:
            parameter.grad = gradient
        self._aside = []
        return ""


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for key, value in values.items()
    }
