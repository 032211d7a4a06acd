"""The batches of undecided steps: what they began with, whether they hold NaN or Inf, and where they are held."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.finite_checks import floats_of
from lightning_memtools.state.starts import BatchStart, changed_in_place

MAX_SAMPLES = 8  # of the bad ones, how many are listed


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A batch of the present step."""

    index: int  # the batch index within the epoch
    batch: Any  # the batch as training_step got it; None after it was released, a copy on the host after it was moved
    # the losses that were sent backward for it, as 0-dim tensors, as training_step returned them
    losses: list[Tensor] = field(default_factory=list)
    keep: bool = False  # whether its loss is known to be bad, so that it is not released
    start: BatchStart | None = None  # the state that it began with; None where that is not recorded
    steps_before: int = 0  # in manual optimization: the number of updates in this batch before this step began
    resumed: BatchStart | None = None  # the state after the last of those updates; None if there were none
    # after it was moved to the host: the names of its tensors that had been written in place by then
    changed: tuple[str, ...] | None = None

    def keep_if_bad(self) -> None:
        """Note whether its loss is bad, as far as that is known without waiting for a device."""
        self.keep = self.keep or any(each.is_cpu and not math.isfinite(each.item()) for each in self.losses)

    def written_in_place(self) -> tuple[str, ...]:
        """Return the names of the batch's tensors that were written since it was taken, as far as that is known."""
        if self.changed is not None:
            return self.changed
        return tuple(changed_in_place(self.batch, self.start.versions)) if isinstance(self.start, BatchStart) else ()


@dataclass(frozen=True, slots=True)
class BadInput:
    """A tensor of a batch that holds NaN or Inf."""

    name: str  # its place in the batch, such as ``batch["x"]``
    batch_idx: int  # the index of the batch
    n_nan: int  # the number of elements that are NaN
    n_inf: int  # the number of elements that are Inf or -Inf
    n_elements: int  # the number of all elements
    samples: tuple[int, ...]  # the first positions along dimension 0 that are affected, one more than are listed
    is_mask: bool  # whether it holds 0 and -inf only, as attention masks do

    def __str__(self) -> str:
        kinds = " and ".join(f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n)
        where = f", in {list_samples(self.samples)}" if self.samples else ""
        return f"{in_batch(self.name, self.batch_idx)} holds {kinds} in {self.n_elements} elements{where}"


def in_batch(name: str, batch_idx: int) -> str:
    """Return the name of a tensor of a batch: "batch 5" where it is the batch itself."""
    return f"batch {batch_idx}" if name == "batch" else f"{name} of batch {batch_idx}"


def list_samples(samples: Sequence[int]) -> str:
    """Return text such as "sample 3" or "samples 3, 4"."""
    more = ", ..." if len(samples) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_SAMPLES]))}{more}"


def bad_inputs(micro: MicroBatch) -> list[BadInput]:
    """Return the tensors of the batch that hold NaN or Inf. Waits for the device; for use after a bad step."""
    found = []
    for name, tensor in named_tensors(micro.batch, "batch"):
        floats = floats_of(tensor)
        if floats is None:
            continue
        bad = ~torch.isfinite(floats)
        if not bad.any():
            continue
        has_samples = floats.dim() > 0 and tensor.layout == torch.strided
        samples = bad.flatten(1).any(1) if has_samples and floats.dim() > 1 else bad
        positions = samples.nonzero()[: MAX_SAMPLES + 1, 0].tolist() if has_samples else []
        n_nan = int(floats.isnan().sum())
        found.append(
            BadInput(
                name=name,
                batch_idx=micro.index,
                n_nan=n_nan,
                n_inf=int(bad.sum()) - n_nan,
                n_elements=floats.numel(),
                samples=tuple(positions),
                is_mask=bool(((floats == 0) | (floats == -torch.inf)).all()),
            )
        )
    return found


def release_batches(
    held: Sequence[MicroBatch], budget_bytes: int, move: Callable[[MicroBatch], object] | None = None
) -> None:
    """Drop the oldest batches, or `move` them elsewhere.

    The newest batch is alive anyway. One more is kept, and older ones for as long as they fit into the budget.

    Args:
        held: The batches, newest first.
        budget_bytes: The memory that the older ones may take.
        move: Called with each batch that does not fit; when left out, such batches are dropped.
    """
    spent = 0
    for micro in held[2:]:
        if micro.batch is None or micro.keep or micro.changed is not None:
            continue
        spent += sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(micro.batch, ""))
        if spent > budget_bytes and move is not None:
            move(micro)
        elif spent > budget_bytes:
            micro.batch = None


def move_to_host(micro: MicroBatch) -> None:
    """Replace the batch's tensors by copies on the host. On a GPU the copy is queued, and the host does not wait."""
    micro.changed = micro.written_in_place()
    micro.batch = map_tensors(micro.batch, _on_host)


def _on_host(tensor: Tensor) -> Tensor:
    device = VirtualDevice.current()
    if (tensor.device.type == "cpu" and device is None) or not is_in_memory(tensor):
        return tensor  # it is already on the host
    with torch.no_grad(), nullcontext() if device is None else device.host():
        # With its strides: they choose the kernel that computes, and so the last bits.
        is_pinned = tensor.device.type == "cuda"
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        if 0 in tensor.stride():
            return tensor.detach().to("cpu", non_blocking=True)  # an expanded tensor cannot be written
        copied.copy_(tensor, non_blocking=True)
    return copied.requires_grad_(tensor.requires_grad)
