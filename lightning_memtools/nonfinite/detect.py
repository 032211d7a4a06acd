"""One fused pass over gradients and losses: a few numbers that are NaN or Inf if anything is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def floats_of(tensor: Tensor) -> Tensor | None:
    """The floating point numbers that a tensor stores on this rank; None where there are none.

    Sparse tensors store their values, distributed tensors their local shard, complex ones pairs of real numbers.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()  # noqa: SLF001, values() refuses gradients that are not coalesced yet
    elif tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return None
    # There are no norms of 8-bit floats.
    return tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()


def gradients_of(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that the optimizer is about to move, and the floats of their gradients."""
    parameters, gradients = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (floats := floats_of(parameter.grad)) is not None:
                parameters.append(parameter)
                gradients.append(floats)
    return parameters, gradients


def norms_of(tensors: Sequence[Tensor], *, exact: bool = False) -> list[Tensor]:
    """The L2 norm of each tensor, as 0-dim tensors in the order given, with one fused kernel per device and dtype.

    A norm is NaN or Inf if an element is. The reverse holds only with `exact`, which squares in float64: in float32,
    100 values of 1e20 have an infinite norm.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(index)
    norms: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (_, dtype), indices in groups.items():
        # A norm of float16 values would overflow above 65504.
        wider = torch.float64 if exact else torch.float32 if dtype == torch.float16 else None
        group = [tensors[index] for index in indices]
        for index, norm in zip(indices, torch._foreach_norm(group, 2, dtype=wider), strict=True):  # noqa: SLF001, torch's own clip_grad_norm_ is built on it
            norms[index] = norm
    return norms


def measure(gradients: Sequence[Tensor], losses: Sequence[Tensor], *, exact: bool = False) -> Tensor | None:
    """The norm over all gradients, each loss, each gradient's norm, on the first gradient's device.

    Returns:
        Shape [1 + losses + gradients], or None where there is neither a gradient nor a loss.
    """
    if not gradients and not losses:
        return None
    device = (gradients or losses)[0].device
    # MPS has no float64. Elsewhere the combined norm should not overflow where none of the norms does.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = [number.to(device, dtype, non_blocking=True) for number in (*losses, *norms_of(gradients, exact=exact))]
    stacked = torch.stack(numbers)
    return torch.cat([torch.linalg.vector_norm(stacked[len(losses) :], keepdim=True), stacked])
