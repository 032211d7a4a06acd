"""The state at the start of a training step, from which a failed attempt is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memtools._torch import write_count, write_count_or_none
from lightning_memtools.doctor.autograd_nodes import nodes_below
from lightning_memtools.memory.nested_tensors import in_new_containers, named_tensors, tensors_in
from lightning_memtools.state.buffer_keeper import BufferKeeper
from lightning_memtools.state.random_state import RandomState

if TYPE_CHECKING:
    from lightning_memtools._lightning import StepClosure

_MOST_NODES = 1_000_000  # of a graph that is searched for reentrant checkpointing


class TrainedState:
    """The parts of a model that a step may change (parameters, metrics and buffers), and the model's device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.parameters = list(model.parameters())  # those that are frozen now may be trained later
        self.metrics = [module for module in model.modules() if isinstance(module, Metric)]
        self.buffers = BufferKeeper(model)


class StepStart:
    """Records the state before a step, to restore it: random states, buffers, metrics, logged values and gradients.

    In the first batch of an optimizer step, gradients are reset to None. In later batches, the accumulated gradients
    are set aside while parts run, so that a failed part cannot change them. If backward fails on the whole batch, some
    parameters may already have its gradients. Those are complete, because backward adds to each parameter only once.
    So they are kept, and the parts add to the gradients of the other parameters only.

    Attributes:
        batch: The batch in new dicts and lists, so that the step cannot change the original ones.
        failure: The out-of-memory error after which the batch is run in parts.
        raised: The last error that came from the step itself, not from the code that recovers it.
        kept: The parameters whose gradients already include this batch.
    """

    def __init__(self, step: StepClosure, state: TrainedState) -> None:
        self.batch = in_new_containers(step.batch)
        self.failure: Exception | None = None
        self.raised: Exception | None = None
        self._step = step
        self._state = state
        self._random = RandomState.now(device=state.device)
        self._take_back_log = _log_restorer(step.results)
        self._metrics = [(metric, _copied(vars(metric))) for metric in state.metrics]
        state.buffers.keep()
        self._tensors = [(tensor, write_count_or_none(tensor)) for tensor in tensors_in(step.batch)]
        self._is_zeroed = step.zero_grad is None
        self._is_whole = False
        self._adds_in_pieces = False
        self.kept: set[nn.Parameter] = set()
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._accumulated: list[tuple[nn.Parameter, Tensor | None, int]] = []
        if step.zero_grad is None:
            self._note_accumulated()

    def run_whole(self) -> Any:
        """Run forward and backward on the whole batch, and return Lightning's ClosureResult."""
        return self._run(self._step.batch, 1.0)

    def run_part(self, part: Any, factor: float) -> Any:
        """Run forward and backward on a part, with its loss multiplied by `factor`. Return its ClosureResult."""
        with _logging_for(part, self._step.results):
            result = self._run(part, factor)
        loss = result.closure_loss
        return result if loss is None else replace(result, closure_loss=loss.detach() * factor)

    def _run(self, batch: Any, factor: float) -> Any:
        loss: Tensor | None = None
        try:
            result = self._step.forward(batch)
            self.zero_once()
            self._is_whole = batch is self._step.batch
            if result.closure_loss is not None:
                loss = result.closure_loss if factor == 1.0 else result.closure_loss * factor
                self._step.backward(loss)
        except Exception as error:
            self.raised = error
            # Such a backward pass starts others, which may add to one gradient several times.
            nodes = () if loss is None else nodes_below(loss.grad_fn, _MOST_NODES)
            self._adds_in_pieces = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
            raise
        return result

    def zero_once(self) -> None:
        """Zero the gradients of the previous optimizer step, unless this was already done."""
        if not self._is_zeroed and self._step.zero_grad is not None:
            self._is_zeroed = True
            self._step.zero_grad()

    def set_gradients_aside(self) -> None:
        """Set aside the gradients that earlier batches accumulated, so that backward cannot change them."""
        self._aside = [(parameter, gradient) for parameter, gradient, _ in self._accumulated if gradient is not None]
        for parameter, _ in self._aside:
            parameter.grad = None

    @torch.no_grad()
    def add_gradients_set_aside(self) -> None:
        """Add the gradients that were set aside to the gradients that the parts gave."""
        for parameter, gradient in self._aside:
            of_parts = None if parameter in self.kept else parameter.grad
            parameter.grad = gradient if of_parts is None else gradient.add_(of_parts)

    def completed(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients already include those of the whole batch when backward failed."""
        if not self._is_whole:
            return []
        if self._step.zero_grad is not None:
            return [parameter for parameter in self._state.parameters if parameter.grad is not None]
        return [
            parameter
            for parameter, old, count in self._accumulated
            if parameter.grad is not old or (old is not None and write_count(old) != count)
        ]

    def take_back(self) -> str:
        """Restore the state at the start of the step. Return "" if this worked, else the reason why it did not."""
        completed, self._is_whole = self.completed(), False
        self._random.restore()
        self._take_back_log()
        for metric, values in self._metrics:
            vars(metric).update(_copied(values))
        unrestored = self._state.buffers.unrestored()
        self._state.buffers.restore()
        if unrestored:
            return f"the step wrote {unrestored[0]}, a large buffer that no earlier step wrote and nothing copied"
        if self._step.zero_grad is not None:
            self.zero_once()
            for parameter in self._state.parameters:
                parameter.grad = None
        elif completed and self._adds_in_pieces:
            return (
                "its backward pass had added to gradients that earlier batches of the same optimizer step accumulated, "
                "and with reentrant checkpointing it may not have added all to them; use_reentrant=False helps"
            )
        elif completed:
            self.kept.update(completed)
            self._note_accumulated()
        for parameter, gradient, _ in self._accumulated:
            parameter.grad = gradient
        written = {id(tensor) for tensor, count in self._tensors if write_count_or_none(tensor) != count}
        name = next((name for name, tensor in named_tensors(self.batch, "batch") if id(tensor) in written), "")
        if name:
            return f"the step wrote {name} in place, so that it would be written twice; let the step make a new tensor"
        return ""

    def _note_accumulated(self) -> None:
        gradients = [(parameter, parameter.grad) for parameter in self._state.parameters]
        self._accumulated = [(p, grad, 0 if grad is None else write_count(grad)) for p, grad in gradients]


def _log_restorer(results: Any) -> Callable[[], None]:
    """Return a function that resets `results` (the values that `self.log` has collected) to the current contents."""
    saved = {key: (metric, dict(vars(metric))) for key, metric in results.items()}
    batch, size = results.batch, results.batch_size

    def restore() -> None:
        for key in [key for key in results if key not in saved]:
            del results[key]
        for metric, values in saved.values():
            vars(metric).clear()
            vars(metric).update(values)
        results.batch, results.batch_size = batch, size

    return restore


@contextmanager
def _logging_for(part: Any, results: Any) -> Iterator[None]:
    """Return a context manager in which `self.log` weights epoch means by the batch size of the part."""
    whole, results.batch, results.batch_size = results.batch, part, None
    try:
        yield
    finally:
        results.batch, results.batch_size = whole, None


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for key, value in values.items()
    }
