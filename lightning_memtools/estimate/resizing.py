"""A batch of another size, without values."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.simulation.step import batch_size_of


def resized(batch: Any, size: int) -> Any:
    """Meta tensors of the batch's shapes with another first dimension, where that is the batch's size."""
    old = batch_size_of(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        # As many elements in the same order of dimensions: a channels_last image stays one.
        order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), -i), reverse=True)
        if order[0] != 0:
            shape = (size, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        return torch.empty_strided(
            (size, *tensor.shape[1:]),
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )

    return map_tensors(batch, resize)


def first_rows(batch: Any, size: int) -> Any:
    """The first samples of a batch, values kept."""
    old = batch_size_of(batch)
    return map_tensors(
        batch, lambda tensor: tensor[:size].clone() if tensor.dim() and tensor.shape[0] == old else tensor
    )
