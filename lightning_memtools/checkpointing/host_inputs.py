"""Keeps the inputs of recomputed layers in host memory between the forward and the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import FakeTensor
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.device import host_memory

_LEAST_BYTES = 1 << 16  # a smaller tensor takes longer to start copying than to copy


def inputs_in_host_memory() -> AbstractContextManager[Any]:
    """Return a context in which activations that autograd saves are copied to the host, and back when it asks.

    On CUDA both copies run on the current stream, from and to pinned memory, as those of
    `torch.autograd.graph.save_on_cpu`. Unlike there, parameters, masks, views of something larger, tensors of less than
    64 KiB and what is in host memory already stay where they are.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: Tensor) -> Any:
    if not _may_leave(tensor):
        return tensor
    if isinstance(tensor, FakeTensor):  # it has no values to keep, and nothing counts what the host holds
        return None, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    with host_memory(), torch.no_grad():
        is_pinned = tensor.is_cuda
        host = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=is_pinned
        )
        host.copy_(tensor, non_blocking=is_pinned)
    return host, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _to_device(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    host, shape, stride, dtype, device = kept
    with torch.no_grad():
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return tensor if host is None else tensor.copy_(host, non_blocking=True)


def _may_leave(tensor: Tensor) -> bool:
    is_plain = type(tensor) in {Tensor, FakeTensor} and tensor.layout is torch.strided and not tensor.is_leaf
    virtual = VirtualDevice.current()
    is_there = tensor.is_cuda or (virtual is not None and virtual.holds(tensor))
    is_whole = is_plain and is_there and tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_whole and tensor.requires_grad and tensor.nbytes >= _LEAST_BYTES
