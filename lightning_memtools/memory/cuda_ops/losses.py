"""Losses of elements, which CUDA computes one by one and then reduces (Loss.cpp, cuda/Loss.cu)."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.cuda_ops.kernels import Run, Workspace, instead_of_on_gpu
from lightning_memtools.memory.cuda_ops.reductions import bytes_of_sum, workspaces
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_NONE = 0
_ELEMENTS = (aten.mse_loss.default, aten.smooth_l1_loss.default)


@instead_of_on_gpu(*_ELEMENTS, aten.huber_loss.default, aten.binary_cross_entropy.default)
def element_loss(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """All but Huber's keep the storage of a loss per element for the one number that they return."""
    at = 3 if func is aten.binary_cross_entropy.default else 2
    reduction = args[at] if len(args) > at else kwargs.get("reduction", 1)
    if reduction == _NONE:
        return run(func, *args, **kwargs)
    options = {"dtype": torch.result_type(args[0], args[1]), "device": torch.device("cpu")}
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    elements = torch.empty(shape, dtype=torch.result_type(args[0], args[1])).flatten()  # on the host: for its sizes
    parts = workspaces(elements, [], gpu, part_bytes=bytes_of_sum(elements.dtype))
    n_bytes = elements.numel() * elements.element_size()
    if func is aten.huber_loss.default:
        with ledger.workspace(n_bytes):
            out = run(aten.empty.memory_format, [], **options)
            ledger.work_with(*parts)
            return out
    out = run(aten.empty.memory_format, [elements.numel()], **options)
    with ledger.workspace(n_bytes if func in _ELEMENTS else elements.element_size()):
        ledger.work_with(*parts)
    return out.as_strided((), ())


class FusedBce(torch.autograd.Function):
    """CUDA's binary_cross_entropy_with_logits, as memory. It computes no values, so it serves fake tensors only.

    torch changes tensors in place in its backward, but not fake ones, which could be of a class that does not allow it.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        """Allocate the logarithms, the losses, and their mean or sum."""
        ctx.save_for_backward(source, target)
        logarithms = torch.empty_like(source)
        losses = torch.empty_like(source)
        out = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
        del logarithms
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Allocate the gradient."""
        del gradient
        source, _ = ctx.saved_tensors
        return torch.empty_like(source), None, None
