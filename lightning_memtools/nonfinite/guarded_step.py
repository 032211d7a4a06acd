"""A step and its batches until it is decided, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.finite_checks import BadTensor, floats_of, is_mask, rows_with
from lightning_memtools.state.random_state import RandomState

MAX_SAMPLES = 8  # of the bad ones, how many are listed


def do_nothing() -> None:
    """Do nothing."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A batch of the present step."""

    index: int  # the batch index within the epoch
    batch: Any  # the batch as training_step got it, on the host after it was moved; None where hooks do not see it
    random: RandomState | None = None  # the random streams before it; None where no step is run again
    # the losses that were sent backward for it, as 0-dim tensors, as training_step returned them
    losses: list[Tensor] = field(default_factory=list)
    updates_before: int = 0  # in manual optimization: the updates that this batch made before this step began
    was_moved: bool = False

    def move_to_host(self) -> None:
        """Replace the tensors by copies on the host. On a GPU the copy is queued, and the host does not wait."""
        if not self.was_moved:
            self.batch, self.was_moved = map_tensors(self.batch, _on_host), True


def _on_host(tensor: Tensor) -> Tensor:
    device = VirtualDevice.current()
    if (tensor.device.type == "cpu" and device is None) or not is_in_memory(tensor):
        return tensor  # it is already on the host
    with torch.no_grad(), nullcontext() if device is None else device.host():
        if 0 in tensor.stride():
            return tensor.detach().to("cpu", non_blocking=True)  # an expanded tensor cannot be written
        # With its strides: they choose the kernel that computes, and so the last bits.
        is_pinned = tensor.device.type == "cuda"
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        copied.copy_(tensor, non_blocking=True)
    return copied.requires_grad_(tensor.requires_grad)


@dataclass(slots=True, eq=False)
class GuardedStep:
    """One optimizer step, from its first micro-batch to the update."""

    number: int  # the training step, counted as the x axis of the logs counts
    # puts the caller's counters back to the start of this step; None while that is not known yet
    restore_loop: Callable[[], None] | None
    micro: list[MicroBatch] = field(default_factory=list)  # its micro-batches, oldest first
    optimizer: Optimizer | None = None  # the optimizer that makes the update, once that is known
    parameters: Sequence[Tensor] = ()  # the parameters with a gradient
    restore_settings: Callable[[], None] = do_nothing  # those of the optimizer, where the step is decided late

    def losses(self) -> list[Tensor]:
        """Return the losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(frozen=True, slots=True)
class HeldBackStep:
    """A bad step that ends the run: its update was held back."""

    step: GuardedStep
    losses: tuple[float, ...]  # on this rank, in the order of `step.losses()`
    norm: float  # over all its gradients
    gradients: tuple[BadTensor, ...] = ()  # the bad ones
    late: bool = False  # whether the update was held back on the device and the host learned of it afterwards
    scaler: str = ""  # says what the gradient scaler did, where that is the reason; else empty
    # the steps that were held back after it, because the host did not know of it yet
    later: tuple[GuardedStep, ...] = ()


@dataclass(slots=True)  # one is made in each step, and a frozen one takes three times as long
class PastStep:
    """A step in the history."""

    step: int
    loss: float  # the mean of the step's losses on this rank; NaN if it had none
    norm: float  # the L2 norm of all gradients, before clipping


@dataclass(frozen=True, slots=True)
class BadInput:
    """A tensor of a batch that holds NaN or Inf."""

    name: str  # its place in the batch, such as ``batch["x"]``
    batch_idx: int
    n_nan: int
    n_inf: int
    n_elements: int
    samples: tuple[int, ...]  # the first positions along dimension 0 that are affected, one more than are listed
    is_mask: bool  # whether it holds 0 and -inf only, as attention masks do

    def __str__(self) -> str:
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples)}" if self.samples else ""
        name = f"batch {self.batch_idx}" if self.name == "batch" else f"{self.name} of batch {self.batch_idx}"
        return f"{name} holds {kinds} in {self.n_elements} elements{where}"


def list_samples(samples: Sequence[int]) -> str:
    """Return text such as "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def bad_inputs(micro: MicroBatch) -> list[BadInput]:
    """Return the tensors of the batch that hold NaN or Inf. Waits for the device; for use after a bad step."""
    inputs = []
    for name, tensor in named_tensors(micro.batch, "batch"):
        floats = floats_of(tensor)
        if floats is None or not (bad := ~torch.isfinite(floats)).any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        n_nan = int(floats.isnan().sum())
        samples = tuple(rows_with(bad, MAX_SAMPLES + 1)) if has_samples else ()
        n_inf = int(bad.sum()) - n_nan
        inputs.append(BadInput(name, micro.index, n_nan, n_inf, floats.numel(), samples, is_mask(floats)))
    return inputs


_MOST_NODES = 10_000


def depends_on_weights(loss: Tensor) -> bool:
    """Return whether a parameter is among the leaves of a loss's graph. Quick where it is so: it goes down first."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), Parameter):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return bool(waiting)


def undivided_loss(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """Return a loss as training_step returned it, 0-dim.

    Args:
        loss: The loss as it goes backward: divided for an accumulation, and multiplied by a gradient scaler.
        divided_by: The number it was divided by.
        scale: The number it was multiplied by; None without a scaler.
    """
    value = loss.detach()
    if divided_by != 1 or scale is not None or value.dtype != torch.float32:
        # A float64 loss may be finite beyond float32's range.
        value = (value if value.dtype == torch.float64 else value.float()) * divided_by
        value = value if scale is None else value / scale
    return value if value.dim() == 0 else value.mean()


@dataclass(slots=True)
class StepReading:
    """The numbers of a step, as the host has read them."""

    norm: float  # over all gradients; of all ranks where no rank has all gradients
    losses: tuple[float, ...]  # this rank's
    norms: tuple[float, ...]  # of each gradient; may be left out where all is finite
    mean_loss: float  # the mean of this rank's losses; NaN if it had none
    worst_loss: float  # the largest mean of all ranks
    is_bad_anywhere: bool  # whether a rank's numbers that decide are not finite, where ranks exchange them
