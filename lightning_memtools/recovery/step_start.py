"""A step on a batch, and the state that it began with, to take a failed attempt back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memtools._torch import WRITE_COUNT
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.random_state import RandomState
from lightning_memtools.state.starts import RestorableBatch

if TYPE_CHECKING:
    from lightning_memtools._lightning import LoggedValues


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A step on one batch.

    Attributes:
        batch: The batch.
        forward: Runs a batch, or a part of one, and returns the result. In training it has `closure_loss`, the tensor
            to send backward, and `extra`, a dict of outputs.
        log: What the step logs.
        backward: Sends a loss backward; None in evaluation.
        zero_grad: Zeroes the gradients of the previous step; None where gradients are accumulated over batches.
        skipped: Returns the result of a skipped batch; None if batches cannot be skipped.
    """

    batch: Any
    forward: Callable[[Any], Any]
    log: LoggedValues
    backward: Callable[[Tensor], None] | None = None
    zero_grad: Callable[[], None] | None = None
    skipped: Callable[[], Any] | None = None


class StepStart:
    """The state that a step began with, to take a failed attempt back.

    The gradients of a batch that is the first of its optimizer step are None before it; those that earlier batches have
    accumulated are set aside while parts run, so that a failed part cannot touch them. Where a failed backward pass of
    the whole batch has added to such a gradient, the sum is kept, because that pass adds to a parameter once, when its
    gradient is complete. The parts then give gradients to the other parameters only.

    Args:
        step: The step.
        parameters: Those that it may give gradients.
        metrics: Those that it may update.
        buffers: Copies of the buffers from before it; None where they need not be restored.
        random: The random streams.
    """

    def __init__(
        self,
        step: BatchStep,
        parameters: Sequence[nn.Parameter],
        metrics: Sequence[Metric],
        buffers: BufferKeeper | None,
        random: RandomState,
    ) -> None:
        self._step = step
        self._batch = RestorableBatch(step.batch)
        self._parameters = parameters
        self._buffers = buffers
        self._random = random
        self._is_zeroed = step.zero_grad is None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._accumulated: list[Tensor | None] = []
        self._write_counts: list[int] = []
        self._is_whole = False
        self._adds_in_pieces = False
        self._kept: set[nn.Parameter] = set()
        self._take_back_log = step.log.save()
        # One that was not updated since its reset is reset again.
        self._metrics = [(metric, _copied(vars(metric)) if metric.update_count else {}) for metric in metrics]
        if step.zero_grad is None and step.backward is not None:
            self._note_accumulated()

    @property
    def has_buffers(self) -> bool:
        """True if the buffers were copied."""
        return self._buffers is not None

    @property
    def is_partly_added(self) -> bool:
        """True if some gradients of the batch are kept, so that the batch can no longer be skipped."""
        return bool(self._kept)

    def run_part(self, part: Any, weight: float) -> Any:
        """Run forward and backward of the batch or of a part."""
        step, is_whole = self._step, part is self._step.batch
        of_part = None if is_whole else RestorableBatch(part)
        result = step.forward(part)
        if of_part is not None:  # it may run again
            of_part.restore()
        if step.backward is None:
            return result
        self.zero_once()
        self._is_whole = is_whole
        if result.closure_loss is not None:
            try:
                step.backward(result.closure_loss if weight == 1.0 else result.closure_loss * weight)
            except Exception:
                # Such a backward pass starts others, which may add to one gradient several times.
                self._adds_in_pieces = has_node(result.closure_loss, "CheckpointFunctionBackward")
                raise
        if is_whole:
            return result
        # What is kept of a part must not hold its graph.
        loss = None if result.closure_loss is None else result.closure_loss.detach()
        return replace(result, closure_loss=loss, extra=map_tensors(result.extra, torch.Tensor.detach))

    def zero_once(self) -> None:
        """Zero the gradients of the previous step. Idempotent."""
        if not self._is_zeroed and self._step.zero_grad is not None:
            self._is_zeroed = True
            self._step.zero_grad()

    def set_gradients_aside(self) -> None:
        """Set the gradients that earlier batches accumulated aside, so that backward does not touch them."""
        self._is_whole = False
        pairs = zip(self._parameters, self._accumulated, strict=False)
        self._aside = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        for parameter, _ in self._aside:
            parameter.grad = None

    @torch.no_grad()
    def add_gradients_set_aside(self) -> None:
        """Put the gradients back with what the parts have added."""
        for parameter, gradient in self._aside:
            of_parts = None if parameter in self._kept else parameter.grad
            parameter.grad = gradient if of_parts is None else gradient.add_(of_parts)
        self._aside = []

    def completed(self) -> list[nn.Parameter]:
        """Return the parameters to which a backward pass of the whole batch has added its gradient."""
        if not self._is_whole:
            return []
        if self._step.zero_grad is not None:
            return [parameter for parameter in self._parameters if parameter.grad is not None]
        counts = iter(self._write_counts)
        return [
            parameter
            for parameter, old in zip(self._parameters, self._accumulated, strict=True)
            if parameter.grad is not old or (old is not None and WRITE_COUNT(old) != next(counts))
        ]

    def take_back(self) -> str:
        """Restore the state that the step began with; return why that is impossible, or ""."""
        if reason := self._restore_all_but_gradients():
            return reason
        if self._step.zero_grad is None and (completed := self.completed()):
            if self._adds_in_pieces:
                return (
                    "its backward pass had added to gradients that earlier batches of the same optimizer step "
                    "accumulated, and with reentrant checkpointing it may not have added all to them; "
                    "use_reentrant=False helps"
                )
            self._kept.update(completed)
            self._note_accumulated()
        self._is_whole = False
        if self._step.backward is not None and self._step.zero_grad is not None:
            self.zero_once()
            for parameter in self._parameters:
                parameter.grad = None
        for parameter, gradient in zip(self._parameters, self._accumulated, strict=False):
            parameter.grad = gradient
        self._aside = []
        return ""

    def _restore_all_but_gradients(self) -> str:
        self._random.restore()
        self._take_back_log()
        for metric, values in self._metrics:
            if values:
                vars(metric).update(_copied(values))
            elif metric.update_count:
                metric.reset()
        if reason := self._batch.restore():
            return reason
        if self._buffers is not None:
            unrestored = self._buffers.unrestored()
            self._buffers.restore()
            if unrestored:
                return f"the step wrote {unrestored[0]}, a large buffer that no earlier step wrote and nothing copied"
        return ""

    def _note_accumulated(self) -> None:
        self._accumulated = [parameter.grad for parameter in self._parameters]
        self._write_counts = [WRITE_COUNT(gradient) for gradient in self._accumulated if gradient is not None]


def has_node(loss: Tensor, name: str) -> bool:
    """Return whether the graph of a loss has a node of this name."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == name:
            return True
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
    return False


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for key, value in values.items()
    }
