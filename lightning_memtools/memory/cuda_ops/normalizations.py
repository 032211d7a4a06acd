"""Batch norm with and without cuDNN (cuda/Normalization.cu), layer norm's backward, RMS norm (layer_norm_kernel.cu)."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memtools.memory.cuda_ops.kernels import (
    HALF,
    Run,
    Workspace,
    copy_bytes,
    instead_of,
    instead_of_on_gpu,
)
from lightning_memtools.memory.cuda_ops.reductions import bytes_of_sum, power_of_two, workspaces
from lightning_memtools.memory.memory_formats import memory_format_of
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_MANY_ROWS, _WARP = 65_536, 32
_MOST_BLOCKS = 32_768


@instead_of(aten.native_batch_norm.default)
def batch_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean and 1/deviation are float32 for half inputs too; kernels for channels last leave parts of their sums."""
    source, weight = args[:2]
    training, native = args[5], is_native_batch_norm(source, weight)
    if not training and not native:  # there is nothing to keep
        return run(func, *args, **kwargs)
    out = run(aten.empty_like.default, source)
    options = {"dtype": torch.float32 if source.dtype in HALF else source.dtype, "device": torch.device("cpu")}
    mean = run(aten.empty.memory_format, [source.shape[1]], **options)
    rstd = run(aten.empty.memory_format, [source.shape[1]], **options)
    if training and native and _has_channels_last(source):
        ledger.work_with(*_parts_of_sums(source, 4))
    return out, mean, rstd


@instead_of(aten.native_batch_norm_backward.default)
def batch_norm_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient of another memory format is copied for cuDNN; torch's own kernels make the wanted gradients alone."""
    gradient, source, weight = args[:3]
    *_, training, _, wanted = args
    if not training:
        return run(func, *args, **kwargs)
    is_native = is_native_batch_norm(source, weight)
    if not (is_native and _has_channels_last(source)):
        copied = 0 if is_native else copy_bytes(gradient, memory_format_of(source))
        with ledger.workspace(copied):
            of_source, of_weight, of_bias = (
                run(aten.empty_like.default, like) if one else None
                for one, like in zip(wanted, (source, weight, weight), strict=True)
            )
        return of_source, of_weight, of_bias
    options = {"device": torch.device("cpu")}
    n_channels = source.shape[1]
    with ledger.workspace(4 * n_channels, 4 * n_channels):  # sums of the gradient, and of its product with the input
        dtype = torch.float32 if weight is None else weight.dtype
        of_weight, of_bias = (
            run(aten.empty.memory_format, [n_channels], dtype=dtype, **options) if one else None for one in wanted[1:]
        )
        if _has_channels_last(gradient):
            ledger.work_with(*_parts_of_sums(source, 2))
        of_source = run(aten.empty_like.default, source) if wanted[0] else None
    return of_source, of_weight, of_bias


def is_native_batch_norm(source: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return whether torch's own kernels run and not cuDNN's (_select_batch_norm_backend of Normalization.cpp)."""
    by_cudnn = source.dtype in {torch.float32, torch.float16} and weight is not None and weight.dtype is torch.float32
    return not by_cudnn or source.dim() == 2  # noqa: PLR2004, rows


def _has_channels_last(tensor: torch.Tensor) -> bool:
    is_dense = tensor.is_contiguous(memory_format=memory_format_of(tensor))
    return is_dense and tensor.stride(1) == 1


def _parts_of_sums(source: torch.Tensor, n_values: int) -> tuple[int, ...]:
    """Return the buffers of blocks that share a channel's sum (flexible_launch_configs of Normalization.cuh)."""
    n_channels = source.shape[1]
    n_rows = source.numel() // max(n_channels, 1)
    width = min(power_of_two(n_channels), 32)
    height = min(power_of_two(-(-n_rows // 16)), 512 // width)
    if width * height != 512:  # noqa: PLR2004, the most threads of a block
        width = min(power_of_two(n_channels), 512 // height)
    n_blocks = min(-(-n_rows // (height * 16)), 128)
    if n_blocks < 8:  # noqa: PLR2004, then it is not worth it
        return ()
    return 4 * n_values * n_channels * n_blocks, 4 * -(-n_channels // width)


@instead_of_on_gpu(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """Strided gradients and inputs are copied; with many narrow rows, blocks leave parts of the weights' gradients."""
    gradient, source, normalized = args[:3]
    width = 1
    for size in normalized:
        width *= size
    n_rows = source.numel() // max(width, 1)
    with ledger.workspace(copy_bytes(source)):
        out = list(run(func, *args, **kwargs))
        with ledger.workspace(copy_bytes(gradient)):
            wanted = [index for index in (1, 2) if out[index] is not None]
            if n_rows > _MANY_ROWS and width // _WARP < gpu.multiprocessors // 2:
                columns = -(-width // _WARP)
                n_blocks = min(_MOST_BLOCKS // columns, -(-n_rows // 32))
                sizes = [n_blocks * width * out[index].element_size() for index in wanted]
                with ledger.workspace(*sizes):
                    for index in wanted:
                        parts = torch.empty(n_blocks, width, dtype=out[index].dtype)  # on the host: for its strides
                        summed = run(aten.empty_like.default, out[index])
                        ledger.work_with(*workspaces(parts, [0], gpu, part_bytes=bytes_of_sum(parts.dtype)))
                        out[index] = summed
    return tuple(out)


class FusedRmsNorm(torch.autograd.Function):
    """CUDA's rms_norm in one kernel, as memory. It computes no values, so it serves fake tensors only."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, n_normalized: int) -> torch.Tensor:
        """Allocate the result, and 1/deviation of each row in float32."""
        out = torch.empty_like(source.contiguous())
        rstd = source.new_empty(source.shape[: source.dim() - n_normalized], dtype=torch.float32)
        ctx.save_for_backward(source, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Allocate the gradients, as layer norm's kernel does."""
        source, weight, rstd = ctx.saved_tensors
        shape = source.shape[rstd.dim() :]
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        made = aten.native_layer_norm_backward(gradient, source, shape, rstd, rstd, weight, None, mask)
        return made[0], made[1], None
