"""Convolutions as cuDNN's callers in torch run them: what they copy into another memory format, and when."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.cuda_ops.kernels import (
    Run,
    Workspace,
    copy_bytes,
    instead_of,
    instead_of_on_gpu,
    nbytes,
)
from lightning_memtools.memory.cuda_ops.reductions import bytes_of_sum, workspaces
from lightning_memtools.memory.memory_formats import memory_format_of
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_SEQUENCE = 3  # dimensions
_MASK = 10  # the place of the argument that says which gradients are wanted


def _format(one: torch.Tensor, other: torch.Tensor) -> torch.memory_format:
    """Return cuDNN's memory format for two tensors (cudnn_conv_suggest_memory_format of ConvUtils.h)."""
    found = memory_format_of(one)
    return memory_format_of(other) if found is torch.contiguous_format else found


@instead_of(aten.convolution.default)
def convolution(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Input and weight are copied if they lie otherwise than cuDNN gets them (Convolution.cpp, cudnn/ConvShared.cpp).

    Its own workspace, which its heuristics choose, is counted apart (memory/convolution_workspaces.py).
    """
    source, weight = args[:2]
    wanted = _format(source, weight)
    with ledger.workspace(copy_bytes(source, wanted)):
        out = run(func, *args, **kwargs)
        ledger.work_with(copy_bytes(weight, wanted))
        return out


@instead_of_on_gpu(aten.convolution_backward.default)
def convolution_backward(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """As forward, and for each gradient on its own; the bias gets a sum over everything but channels."""
    gradient, source, weight = args[:3]
    wanted = args[_MASK]
    one_dimensional = source.dim() == _SEQUENCE
    formats = {memory_format_of(one) for one in (gradient, source, weight)}
    nothing_copied = len(formats) == 1 and not any(copy_bytes(one, *formats) for one in (gradient, source, weight))
    together = run(func, *args, **kwargs) if nothing_copied else None

    def alone(index: int) -> Any:
        if together is not None:
            return together[index]
        mask = [one == index for one in range(3)]
        return run(func, *args[:_MASK], mask, **kwargs)[index] if wanted[index] else None

    # Copies for sequences live until the end, those for images until the sums of the bias begin.
    with ledger.workspace(copy_bytes(source) if one_dimensional else 0):
        if one_dimensional:
            source = source.contiguous()
        backend = _format(source, weight)
        with ledger.workspace(copy_bytes(source, backend) if wanted[1] else 0):
            if wanted[1]:
                source = source.contiguous(memory_format=backend)  # on the host: only its strides are of use
            copied = memory_format_of(gradient) is not memory_format_of(source)
            with ledger.workspace(nbytes(gradient) if copied else 0):
                layout = gradient.contiguous(memory_format=memory_format_of(source)) if copied else gradient
                of_source = alone(0)
                if wanted[0]:
                    form = _format(layout, weight)
                    ledger.work_with(copy_bytes(weight, form), copy_bytes(layout, form))
                form = _format(source, layout)
                with ledger.workspace(*(copy_bytes(one, form) for one in (layout, source) if wanted[1])):
                    of_weight = alone(1)
        of_bias = alone(2)
        if wanted[2]:
            dims = [0, *range(2, gradient.dim())]
            ledger.work_with(*workspaces(gradient, dims, gpu, part_bytes=bytes_of_sum(gradient.dtype)))
    return of_source, of_weight, of_bias
