"""A step on a batch, and what it began with: to take a failed attempt at it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memtools._torch import WRITE_COUNT, buffers_of
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.nonfinite.buffer_keeper import BufferKeeper
from lightning_memtools.oom.restorable_batch import RestorableBatch, write_counts
from lightning_memtools.state.random_state import NumpyStateReader, PythonStateReader, RandomState

_IS_SET: Any = partial(is_not, None)
# Steps.
_LISTED_EVERY = 16


class StepLog(Protocol):
    """The values that a step logs."""

    @property
    def loss_divisor(self) -> float:
        """The number that a step's loss was divided by before it is sent backward."""

    def save(self) -> Callable[[], None]:
        """Return the function that takes back what is logged from now on."""

    def size_of(self, batch: Any) -> int:
        """Return the size that is inferred from a batch, where what is logged comes without one."""

    def running(self, part: Any) -> AbstractContextManager[None]:
        """Return a context in which a part's size is the batch size of what is logged."""

    def of_part(self) -> Mapping[str, Any]:
        """Return what the part has logged, as `logged_by_whole` takes it."""

    def put(self, batch: Any, whole: Mapping[str, Any]) -> None:
        """Replace what the parts have logged by what the whole batch logs."""


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


class StepBuffers:
    """Restores a model's buffers after a failed step. They are copied before a step only if steps are seen to write.

    Else it is noted how often each was written, which costs no kernel. The first step is always copied for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._keeper = BufferKeeper(model, all_state=False)
        self._held = [(name, held) for name, part in model.named_modules() if (held := buffers_of(part))]
        self._registers = [held for _, held in self._held]
        self._tensors: list[Tensor] = []
        self._n_steps = 0
        self._before: tuple[list[int], list[int]] | None = None
        self._are_written = False
        self._are_copied = False

    def start(self, *, uncounted: bool) -> None:
        """Note or copy the buffers. `uncounted`: the step may write some without counting it, as batch norm does."""
        self._are_copied = uncounted or self._are_written
        if not self._are_copied:
            self._n_steps += 1
            is_first = self._before is None
            # A tensor that takes a buffer's place is looked for less often: that takes longer than all the rest.
            if self._before is None or self._n_steps < _LISTED_EVERY or self._n_steps % _LISTED_EVERY == 0:
                now = self._now()
            else:
                now = self._before[0], write_counts(self._tensors)
            self._are_written = now != self._before and not is_first
            self._are_copied = self._are_written or is_first
            self._before = now
        if self._are_copied:
            self._keeper.keep()

    def restore(self) -> str:
        """Restore the buffers, and return the reason why that cannot be done, else ""."""
        if self._are_copied:
            unrestored = self._keeper.unrestored()
            self._keeper.restore()
        else:
            unrestored = self._changed()
        if not unrestored:
            return ""
        return f"the step wrote {unrestored[0]}, a buffer that no earlier step wrote, so that no copy was made"

    def _now(self) -> tuple[list[int], list[int]]:
        # The tensors are held, so that no other gets the identity of one.
        self._tensors = list(filter(_IS_SET, chain.from_iterable(map(dict.values, self._registers))))
        return list(map(id, self._tensors)), write_counts(self._tensors)

    def _changed(self) -> list[str]:
        now = self._now()
        if now == self._before:
            return []
        names = [
            f"{name}.{key}" if name else key
            for name, held in self._held
            for key, each in held.items()
            if each is not None
        ]
        pairs = zip(names, zip(*now, strict=True), zip(*(self._before or ()), strict=True), strict=False)
        return [name for name, after, before in pairs if after != before] or names[-1:]


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
        buffers: The buffers, which have been noted; None where they need not be restored.
        random: The random streams.
    """

    def __init__(
        self,
        step: BatchStep,
        parameters: Sequence[nn.Parameter],
        metrics: Sequence[Metric],
        buffers: StepBuffers | None,
        random: RandomState,
    ) -> None:
        self._step = step
        self._batch = RestorableBatch(step.batch)
        self._parameters = parameters
        self._buffers = buffers
        self._random = random
        self._is_zeroed = step.zero_grad is None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._is_aside = False  # or copied
        self._accumulated: list[Tensor | None] = []
        self._write_counts: list[int] = []
        self._is_whole = False
        self._adds_in_pieces = False
        self._kept: set[nn.Parameter] = set()
        self._take_back_log = step.log.save()
        # One that was not updated since its reset is reset again.
        self._metrics = [(metric, _copied(vars(metric)) if metric.update_count else {}) for metric in metrics]
        if step.zero_grad is None and step.backward is not None:
            self._accumulated = [parameter.grad for parameter in parameters]
            self._count_writes()

    @property
    def is_partly_added(self) -> bool:
        """True if some gradients of the batch are kept, so that it cannot be left out any more."""
        return bool(self._kept)

    def run_part(self, step: BatchStep, part: Any, weight: float) -> Any:
        """Run forward and backward of the batch or of a part."""
        of_part = None if part is step.batch else RestorableBatch(part)
        result = step.forward(part)
        if of_part is not None:  # it may run again
            of_part.restore()
        if step.backward is None:
            return result
        self.zero_once()
        self._is_whole = part is step.batch
        if result.closure_loss is not None:
            try:
                step.backward(result.closure_loss if weight == 1.0 else result.closure_loss * weight)
            except Exception:
                # Such a backward pass starts others, which may add to one gradient several times.
                self._adds_in_pieces = has_node(result.closure_loss, "CheckpointFunctionBackward")
                raise
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

    @torch.no_grad()
    def copy_gradients(self) -> None:
        """Keep copies of the gradients that earlier batches accumulated, where a failed step may add to any of them."""
        self._is_aside = True
        self._accumulated = [None if gradient is None else gradient.clone() for gradient in self._accumulated]

    def set_gradients_aside(self) -> None:
        """Take the gradients that earlier batches accumulated out of the reach of backward."""
        self._is_aside = True
        self._aside = [
            (parameter, gradient)
            for parameter, gradient in zip(self._parameters, self._accumulated, strict=False)
            if gradient is not None
        ]
        for parameter, _ in self._aside:
            parameter.grad = None

    @torch.no_grad()
    def add_gradients_set_aside(self) -> None:
        """Put the gradients back with what the parts have added."""
        for parameter, gradient in self._aside:
            of_parts = None if parameter in self._kept else parameter.grad
            parameter.grad = gradient if of_parts is None else gradient.add_(of_parts)
        self._aside, self._is_aside = [], False

    def completed(self) -> list[nn.Parameter]:
        """Return the parameters to which a backward pass of the whole batch has added its gradient."""
        if not self._is_whole or self._is_aside:
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
        """Restore what the step began with, and return the reason why that cannot be done, else ""."""
        if reason := self.take_back_all_but_gradients():
            return reason
        if self._step.zero_grad is None and (completed := self.completed()):
            if self._adds_in_pieces:
                return (
                    "its backward pass had added to gradients that earlier batches of the same optimizer step "
                    "accumulated, and with reentrant checkpointing it may not have added all to them; "
                    "use_reentrant=False helps"
                )
            self._kept.update(completed)
            self._accumulated = [parameter.grad for parameter in self._parameters]
            self._count_writes()
        self._is_whole = False
        if self._step.backward is not None and self._step.zero_grad is not None:
            self.zero_once()
            for parameter in self._parameters:
                parameter.grad = None
        for parameter, gradient in zip(self._parameters, self._accumulated, strict=False):
            parameter.grad = gradient
        self._aside, self._is_aside = [], False
        return ""

    def take_back_all_but_gradients(self) -> str:
        """Restore random streams, logged values, metrics, buffers and the batch.

        Returns the reason why one cannot be restored, else "".
        """
        self._random.restore()
        self._take_back_log()
        for metric, values in self._metrics:
            if values:
                vars(metric).update(_copied(values))
            elif metric.update_count:
                metric.reset()
        of_batch = self._batch.restore()
        return of_batch or ("" if self._buffers is None else self._buffers.restore())

    def _count_writes(self) -> None:
        self._write_counts = list(map(WRITE_COUNT, filter(_IS_SET, self._accumulated)))


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


class RandomReader:
    """Reads the random streams that a step on a device may draw from; quickly as long as nobody draws."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy, self._python = NumpyStateReader(), PythonStateReader()

    def __call__(self) -> RandomState:
        """Return the state of the streams now. Does not wait for the device."""
        return RandomState.now(self._numpy, self._python, device=self._device)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for key, value in values.items()
    }
