"""A step with its batches, from the first forward pass to the verdict, and the numbers that are read of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import is_in_memory, write_count_or_none
from lightning_memtools.memory.nested_tensors import in_new_containers, map_tensors, named_tensors, tensors_in
from lightning_memtools.memory.virtual import VirtualDevice, host_memory
from lightning_memtools.nonfinite.finite_checks import BadTensor, floats_of, rows_with
from lightning_memtools.state.random_state import RandomState

MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch of an optimizer step, with its losses."""

    index: int  # the batch index within the epoch
    batch: Any  # the batch as training_step got it, on the host after it was moved; None where hooks do not see it
    random: RandomState | None = None  # the random streams before it; None where no step is run again
    # the losses that were sent backward for it, as 0-dim tensors, as training_step returned them
    losses: list[Tensor] = field(default_factory=list)
    updates_before: int = 0  # in manual optimization: the updates that this batch made before this step began
    was_moved: bool = False
    is_copied: bool = False  # whether the step has tensors of its own, so that it cannot write to these

    def move_to_host(self) -> None:
        """Replace the batch's tensors with copies in host memory. On a GPU the copies are asynchronous."""
        if not self.was_moved:
            with host_memory():
                self.batch, self.was_moved = map_tensors(self.batch, _on_host), True


class BatchKeeper:
    """Keeps each batch as training_step received it, because training_step may change its batch.

    Dicts and lists are always copied, tensors only if training_step has written to a tensor of the first two batches.
    """

    def __init__(self) -> None:
        self.copies = False
        self._n_watched, self._counts = 0, list[tuple[Tensor, int]]()

    def keep(self, batch: Any) -> Any:
        """Copy a batch, so that training_step cannot change the copy. Call this before training_step gets the batch."""
        if self.copies:
            return map_tensors(batch, _copied)
        self._n_watched += 1
        if self._n_watched <= 2:  # noqa: PLR2004, as said above
            self._counts = [(tensor, write_count_or_none(tensor)) for tensor in tensors_in(batch)]
        return in_new_containers(batch)

    def end_batch(self) -> None:
        """Check whether training_step wrote to tensors of the batch. If so, tensors of later batches are copied."""
        self.copies = self.copies or any(write_count_or_none(tensor) != count for tensor, count in self._counts)
        self._counts = []


@torch.no_grad()
def _copied(tensor: Tensor, device: str | None = None) -> Tensor:
    if not is_in_memory(tensor):
        return tensor
    # Its strides are kept: they choose the kernel that computes, and so the last bits. Not waiting pins the memory.
    copied = tensor.detach().to(device or tensor.device, non_blocking=True, copy=True)
    return copied.requires_grad_(tensor.requires_grad)


def _on_host(tensor: Tensor) -> Tensor:
    is_there = tensor.device.type == "cpu" and VirtualDevice.current() is None
    return tensor if is_there else _copied(tensor, "cpu")


@dataclass(slots=True, eq=False)  # one is made in each step, and a frozen one takes three times as long
class GuardedStep:
    """An optimizer step, from its first micro-batch to its update, with its losses and gradient norms."""

    number: int  # the training step, counted as the x axis of the logs counts
    micro: list[MicroBatch]  # its micro-batches, oldest first
    # puts the caller's counters back to the start of this step; None while that is not known yet
    restore_loop: Callable[[], None] | None
    optimizer: Optimizer | None = None  # the optimizer that makes the update, once that is known
    parameters: Sequence[Tensor] = ()  # the parameters with a gradient
    restore_settings: Callable[[], None] = lambda: None  # those of the optimizer, where the step is decided late
    # --- what was read of it
    read_losses: tuple[float, ...] = ()  # this rank's, in the order of `losses()`
    norms: tuple[float, ...] = ()  # of each gradient
    norm: float = math.nan  # the L2 norm over all gradients, before clipping; of all ranks where each has only a part
    mean_loss: float = math.nan  # the mean of this rank's losses; NaN if there are none
    worst_loss: float = math.nan  # the largest mean loss of all ranks
    gradients: tuple[BadTensor, ...] = ()  # the bad ones
    scaler: str = ""  # says what the gradient scaler did, where that makes the step bad

    def losses(self) -> list[Tensor]:
        """Return the losses of all micro-batches."""
        return [loss for micro in self.micro for loss in micro.losses]


@dataclass(slots=True)
class PastStep:
    """The step number, loss and gradient norm of an earlier step."""

    step: int
    loss: float  # the mean of the step's losses on this rank; NaN if it had none
    norm: float  # the L2 norm of all gradients, before clipping


@dataclass(frozen=True, slots=True)
class BadInput:
    """A batch tensor that holds NaN or Inf."""

    name: str  # its place in the batch, such as ``batch["x"]``
    batch_idx: int
    n_nan: int
    n_inf: int
    n_elements: int
    samples: tuple[int, ...]  # the first positions along dimension 0 that are affected, one more than are listed
    is_mask: bool  # whether nothing in it is bad but -inf, which may be meant, as in attention masks
    counts: str = "sample"  # what dimension 0 counts: "row" where tensors differ in it, as in a batch of graphs

    def __str__(self) -> str:
        name = f"batch {self.batch_idx}" if self.name == "batch" else f"{self.name} of batch {self.batch_idx}"
        if self.is_mask:
            return f"{name} holds -Inf in {self.n_inf} of {self.n_elements} elements, as masks do"
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples, self.counts)}" if self.samples else ""
        return f"{name} holds {kinds} in {self.n_elements} elements{where}"


def list_samples(samples: Sequence[int], counts: str = "sample") -> str:
    """Return a string such as "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"{counts}{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def n_samples_of(batch: Any) -> int | None:
    """Return the number of samples: the size of dimension 0 if all tensors of the batch agree on it, else None."""
    lengths = {tensor.shape[0] for tensor in tensors_in(batch) if is_in_memory(tensor) and tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def bad_inputs(micro: MicroBatch) -> list[BadInput]:
    """Return the batch tensors that hold NaN or Inf. Slow, because it waits for the device."""
    inputs, counts = [], "row" if n_samples_of(micro.batch) is None else "sample"
    for name, tensor in named_tensors(micro.batch, "batch"):
        floats = floats_of(tensor)
        if floats is None or not (bad := ~torch.isfinite(floats)).any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        n_nan = int(floats.isnan().sum())
        samples = tuple(rows_with(bad, MAX_SAMPLES + 1)) if has_samples else ()
        is_mask = not n_nan and not bool(torch.isposinf(floats).any())
        n_inf = int(bad.sum()) - n_nan
        inputs.append(BadInput(name, micro.index, n_nan, n_inf, floats.numel(), samples, is_mask, counts))
    return inputs


def undivided_loss(loss: Tensor, divided_by: int, scale: Tensor | None) -> Tensor:
    """Return a loss as it was before it was divided for gradient accumulation and scaled, as a 0-dim tensor."""
    value = loss.detach()
    if divided_by != 1 or scale is not None or value.dtype != torch.float32:
        # A float64 loss may be finite beyond float32's range.
        value = (value if value.dtype == torch.float64 else value.float()) * divided_by
        value = value if scale is None else value / scale
    return value if value.dim() == 0 else value.mean()
