"""The buckets in which DistributedDataParallel sums gradients over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is small, so that the first sum starts early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module in a DistributedDataParallel, and in what torch.compile returns; any other module itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def bucket_bytes(parameters: Iterable[nn.Parameter], bucket_mb: float) -> list[int]:
    """The size of every bucket of a DDP rank, in bytes.

    Parameters that require gradients go into buckets in the reverse of their order, nearly that in which their
    gradients come, one kind of tensor (dtype) to a bucket; a bucket is closed once it has reached its size. The rule
    is that of compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp.
    """
    cap = int(bucket_mb * 2**20)
    open_buckets: dict[torch.dtype, int] = {}
    n_closed: dict[torch.dtype, int] = {}
    closed: list[int] = []
    for parameter in reversed([parameter for parameter in parameters if parameter.requires_grad]):
        dtype = parameter.dtype
        size = open_buckets.get(dtype, 0) + parameter.numel() * parameter.element_size()
        limit = FIRST_BUCKET_BYTES if n_closed.get(dtype, 0) == 0 else cap
        if size >= min(limit, cap):
            closed.append(size)
            n_closed[dtype] = n_closed.get(dtype, 0) + 1
            open_buckets[dtype] = 0
        else:
            open_buckets[dtype] = size
    return [*closed, *(size for size in open_buckets.values() if size)]


def move_gradients_into_buckets(parameters: Iterable[nn.Parameter]) -> None:
    """From now on every gradient is copied into memory made here, and lives there, as with gradient_as_bucket_view.

    DDP does so when the gradient is done (mark_variable_ready_dense in reducer.cpp), so it exists twice for a moment.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            put = partial(_put_gradient, torch.empty_like(parameter))
            parameter.register_post_accumulate_grad_hook(put)  # type: ignore[no-untyped-call]


def _put_gradient(place: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is not place and parameter.grad is not None:
        parameter.grad = place.copy_(parameter.grad)
