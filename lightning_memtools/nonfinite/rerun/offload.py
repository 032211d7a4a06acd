"""Moves older batches of an accumulation to the host: a replay needs them, and the device's memory is for training."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.nonfinite.batches import MicroBatch
from lightning_memtools.nonfinite.rerun.start import Start, changed_in_place


def move_to_host(micro: MicroBatch) -> None:
    """Put copies on the host in the place of the batch's tensors. On a GPU the copy is queued, not waited for."""
    assert isinstance(micro.start, Start)
    micro.changed = tuple(changed_in_place(micro.batch, micro.start.versions))
    micro.batch = map_tensors(micro.batch, _on_host)


def _on_host(tensor: Tensor) -> Tensor:
    device = VirtualDevice.current()
    if tensor.layout != torch.strided or (tensor.device.type == "cpu" and device is None):
        return tensor  # it is on the host already
    with torch.no_grad(), nullcontext() if device is None else device.host():
        # With its strides: they choose the kernel that computes, and so the last bits.
        is_pinned = tensor.device.type == "cuda"
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        if 0 in tensor.stride():
            return tensor.detach().to("cpu", non_blocking=True)  # an expanded tensor cannot be written
        copied.copy_(tensor, non_blocking=True)
    return copied.requires_grad_(tensor.requires_grad)
