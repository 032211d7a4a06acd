"""The allocations of CUDA's kernels, for operators where the CPU's kernels allocate something else.

Each function here is called in place of its operator. It runs the operator on the fake tensors and allocates CUDA's
workspace for a moment (`ledger.work_with`), or returns results of CUDA's sizes. docs/estimate-memory.md lists them with
their sources; the tests check each on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import torch

aten = torch.ops.aten


class Workspace(Protocol):
    """The part of the device's ledger that kernels use."""

    def work_with(self, *sizes: int) -> None:
        """Allocate the blocks that a kernel needs while it runs, and free them."""


Run = Callable[..., Any]
Kernel = Callable[[Workspace, Run, Any, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[Any, Kernel] = {}
"""The kernel of each operator that differs."""

SIZED: dict[Any, Kernel] = {}
"""Replacements, on the CPU too, of operators whose values decide the result's size, if an argument gives that size."""

_HALF = frozenset({torch.float16, torch.bfloat16})
_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072


def instead_of(*operators: Any) -> Callable[[Kernel], Kernel]:
    """Register a kernel for operators."""

    def register(kernel: Kernel) -> Kernel:
        KERNELS.update(dict.fromkeys(operators, kernel))
        return kernel

    return register


def _bincount(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``minlength`` counts, as for torchmetrics, which passes the number of classes."""
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)  # noqa: PLR2004, its third argument
    if minlength == 0:
        return run(func, *args, **kwargs)
    del ledger
    return run(aten.empty.memory_format, [minlength], dtype=torch.int64, device=torch.device("cpu"))


SIZED[aten.bincount.default] = _bincount


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def _copy_if_strided(ledger: Workspace, *tensors: torch.Tensor) -> None:
    # Kernels that need contiguous inputs copy all others, and free the copies when they are done.
    for tensor in tensors:
        if not tensor.is_contiguous():
            ledger.work_with(nbytes(tensor))


@instead_of(aten.native_layer_norm.default)
def layer_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean and 1/deviation are float32 for half inputs too; a strided input is copied (cuda/layer_norm_kernel.cu)."""
    out = _statistics_in_float(run, func, args, kwargs)
    _copy_if_strided(ledger, args[0])
    return out


@instead_of(aten.native_group_norm.default)
def group_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies what is not contiguous, channels last too, and needs float32 values per channel and per group.

    Of halves mean and 1/deviation per group; with a weight or bias, and unless each channel is one value, a and b of
    y = a x + b per channel (group_norm.cpp, cuda/group_norm_kernel.cu).
    """
    source, weight, bias, n_samples, n_channels, n_places, n_groups = args[:7]
    if not source.is_contiguous():
        source = run(aten.clone.default, source, memory_format=torch.contiguous_format)
    out = run(func, source, *args[1:], **kwargs)
    n_values = 2 * n_samples * n_groups if source.dtype in _HALF else 0
    if n_places > 1 and (weight is not None or bias is not None):
        n_values += 2 * n_samples * n_channels
    ledger.work_with(4 * n_values)
    return out


@instead_of(aten.native_group_norm_backward.default)
def group_norm_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two or three float32 values per channel, and two per group (cuda/group_norm_kernel.cu)."""
    out = run(func, *args, **kwargs)
    gradient, source, _, _, weight, n_samples, n_channels, n_places, n_groups = args[:9]
    _copy_if_strided(ledger, gradient, source)
    n_per_channel = 0 if n_places == 1 else 2 + (weight is not None)
    ledger.work_with(4 * n_samples * (n_per_channel * n_channels + 2 * n_groups))
    return out


def _statistics_in_float(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].dtype not in _HALF:
        return run(func, *args, **kwargs)
    source, normalized = args[0], args[1]
    shape = [*source.shape[: source.dim() - len(normalized)], *[1] * len(normalized)]
    out = run(aten.empty_like.default, source, memory_format=torch.contiguous_format)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    mean = run(aten.empty.memory_format, shape, **options)
    rstd = run(aten.empty.memory_format, shape, **options)
    return out, mean, rstd


@instead_of(aten.native_dropout.default)
def dropout(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask is made before the output (cuda/Dropout.cu), which counts where free blocks are few."""
    source, share, *training = args
    if not 0 < share < 1 or kwargs or training == [False]:
        return run(func, *args, **kwargs)
    del ledger
    mask = run(aten.empty_like.default, source, dtype=torch.bool)
    return run(aten.empty_like.default, source), mask


@instead_of(aten.native_batch_norm.default)
def batch_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean and 1/deviation are float32 for half inputs too (cuda/Normalization.cuh, batch_norm_cuda)."""
    del ledger
    out = run(func, *args, **kwargs)
    if args[0].dtype not in _HALF or out[1].numel() == 0 or out[1].dtype is torch.float32:
        return out
    result, n_channels = out[0], out[1].numel()
    del out
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    mean = run(aten.empty.memory_format, [n_channels], **options)
    rstd = run(aten.empty.memory_format, [n_channels], **options)
    return result, mean, rstd


@instead_of(aten.native_layer_norm_backward.default)
def layer_norm_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Strided gradients and inputs are copied."""
    out = run(func, *args, **kwargs)
    _copy_if_strided(ledger, args[0], args[1])
    return out


@instead_of(aten.embedding_dense_backward.default)
def embedding_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """More than 3072 indices are sorted, and summed in float32 piece by piece (cuda/EmbeddingBackwardKernel.cu)."""
    out = run(func, *args, **kwargs)
    gradient, indices, n_weights = args[0], args[1], args[2]
    n_indices = indices.numel()
    if n_indices > _FEW_INDICES:
        # The sorted indices, their original positions, and the starts of runs of equal indices; three numbers for each
        # run or part of a run; and one row of sums for each part.
        n_runs = min(n_indices, n_weights)
        n_parts = n_indices // _ROWS_PER_THREAD + n_runs
        n_numbers = 3 * n_indices + 2 * n_runs + n_parts
        ledger.work_with(n_numbers * indices.element_size() + 4 * n_parts * gradient.shape[-1])
    return out


@instead_of(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums the query's gradient in float32, sequence and head rounded up (cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    out = run(func, *args, **kwargs)
    query = args[1]
    batch, heads, length, head = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-head // 32) * 32 if head <= 192 else 256  # noqa: PLR2004, mha_bwd's head_size_rounded
    ledger.work_with(4 * batch * heads * rounded * (wide + 1))
    if args[2].shape[1] != heads:  # grouped queries: gradients of key and value are made per query head first
        ledger.work_with(2 * prod((batch, args[2].shape[2], heads, head)) * query.element_size())
    return out


@instead_of(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums the query's gradient in float32, or multiplies gradient and output (cuda/attention_backward.cu)."""
    out = run(func, *args, **kwargs)
    query = args[1]
    ledger.work_with(4 * query.numel() + 4 * query.numel() // query.shape[-1])
    return out


@instead_of(aten.convolution.default)
def convolution(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs are contiguous or channels last for cuDNN; any other is copied (cudnn/ConvShared.cpp).

    Its own workspace, which its heuristics choose by GPU and shape, is not known here and not counted.
    """
    out = run(func, *args, **kwargs)
    _copy_for_convolution(ledger, args[0], args[1])
    return out


@instead_of(aten.convolution_backward.default)
def convolution_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As forward: strided gradients and inputs are copied."""
    out = run(func, *args, **kwargs)
    _copy_for_convolution(ledger, args[0], args[2])
    return out


def _copy_for_convolution(ledger: Workspace, tensor: torch.Tensor, weight: torch.Tensor) -> None:
    if tensor.dim() == 4:  # noqa: PLR2004, images
        wants_last = any(_is_last_only(one) for one in (tensor, weight))
        wanted = torch.channels_last if wants_last else torch.contiguous_format
        if tensor.is_contiguous(memory_format=wanted):
            return
    elif tensor.is_contiguous():
        return
    ledger.work_with(nbytes(tensor))


def _is_last_only(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
