"""The memory format that a tensor's strides suggest."""

from __future__ import annotations

import torch


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that a tensor's strides suggest, as suggest_memory_format of c10 does."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(tensor.dim())
    if order is None or tensor.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for dim in order:
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = stride * size
    return torch.channels_last if len(order) == 4 else torch.channels_last_3d  # noqa: PLR2004, images
