"""The allocations of CUDA's kernels, for operators where the CPU's kernels allocate something else.

Each function here is called in place of its operator. It runs the operator on the fake tensors and allocates CUDA's
workspace for a moment (`ledger.work_with`), or returns results of CUDA's sizes. The tests check each on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from lightning_memtools._torch import FOREACH_NORM_TAKES_ADDRESSES, GROUP_NORM_IS_CHANNELS_LAST, FakeTensor
from lightning_memtools.memory.memory_formats import memory_format_of
from lightning_memtools.memory.virtual.module_scopes import stores_gradient

aten = torch.ops.aten


class Workspace(Protocol):
    """The part of the device's ledger that kernels use."""

    def work_with(self, *sizes: int) -> None:
        """Allocate the blocks that a kernel needs while it runs, and free them."""

    def workspace(self, *sizes: int) -> AbstractContextManager[None]:
        """Allocate blocks, one after the other, that are freed on leaving; none for a size of 0."""


Run = Callable[..., Any]
Kernel = Callable[[Workspace, Run, Any, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[Any, Kernel] = {}
"""The kernel of each operator that differs."""

GPU_KERNELS: dict[Any, Callable[..., Any]] = {}
"""Kernels that differ from GPU to GPU; they take its `GpuShape` as ``gpu``."""

SIZED: dict[Any, Kernel] = {}
"""Replacements, on the CPU too, of operators whose values decide the result's size, if an argument gives that size."""

HALF = frozenset({torch.float16, torch.bfloat16})


def instead_of(*operators: Any) -> Callable[[Kernel], Kernel]:
    """Register a kernel for operators."""

    def register(kernel: Kernel) -> Kernel:
        KERNELS.update(dict.fromkeys(operators, kernel))
        return kernel

    return register


def instead_of_on_gpu(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel that depends on the GPU for operators."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        GPU_KERNELS.update(dict.fromkeys(operators, kernel))
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


def _clone(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a sparse tensor with as many values; FakeTensorMode's clone has none.

    Autograd keeps a new sparse gradient itself, if nothing else refers to it. For fake tensors it cannot tell, and
    clones it.
    """
    del ledger
    source = args[0]
    if source.layout is not torch.sparse_coo:
        return run(func, *args, **kwargs)
    parts = [run(each, source) for each in (aten._indices.default, aten._values.default)]
    if not stores_gradient():
        parts = [run(func, part) for part in parts]
    dimensions = source.sparse_dim(), source.dense_dim(), source.shape
    options = {"dtype": source.dtype, "layout": source.layout, "device": source.device}
    return run(aten._sparse_coo_tensor_with_dims_and_tensors.default, *dimensions, *parts, **options)


SIZED[aten.clone.default] = _clone


def _nothing(_: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Skip an in-place operator on lists, which makes no tensor: this halves the time of a fake optimizer's step.

    Counts of steps are fake tensors that have values, by which optimizers divide.
    """
    if args[0] and isinstance(args[0][0], FakeTensor) and args[0][0].constant is None:
        return None
    return run(func, *args, **kwargs)


_IN_PLACE = (
    aten._foreach_add_, aten._foreach_sub_, aten._foreach_mul_, aten._foreach_div_, aten._foreach_lerp_,
    aten._foreach_addcmul_, aten._foreach_addcdiv_, aten._foreach_sqrt_, aten._foreach_neg_, aten._foreach_zero_,
    aten._foreach_maximum_, aten._foreach_minimum_, aten._foreach_clamp_max_, aten._foreach_clamp_min_,
    aten._foreach_copy_, aten._foreach_pow_, aten._foreach_reciprocal_, aten._foreach_sign_,
)  # fmt: skip
UNNEEDED: dict[Any, Any] = {
    **{getattr(one, name): _nothing for one in _IN_PLACE for name in one.overloads()},  # type: ignore[no-untyped-call]
}
"""Operators that need not run on fake tensors."""


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def copy_bytes(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Return the bytes of the copy that `Tensor.contiguous` makes; 0 if it makes none."""
    return 0 if tensor.is_contiguous(memory_format=memory_format) else nbytes(tensor)


@instead_of(aten.native_layer_norm.default)
def layer_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean and 1/deviation are float32 for half inputs too; a strided input is copied (cuda/layer_norm_kernel.cu)."""
    with ledger.workspace(copy_bytes(args[0])):
        return _statistics_in_float(run, func, args, kwargs)


@instead_of(aten.native_group_norm.default)
def group_norm(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Needs float32 values per channel and per group.

    Of halves mean and 1/deviation per group; with a weight or bias, and unless each channel is one value, a and b of
    y = a x + b per channel (group_norm.cpp, cuda/group_norm_kernel.cu).
    """
    source, weight, bias, n_samples, n_channels, n_places, n_groups = args[:7]
    memory_format = _format_of_group_norm(source)
    out = run(func, source.contiguous(memory_format=memory_format), *args[1:], **kwargs)
    per_group = 4 * n_samples * n_groups if source.dtype in HALF else 0
    per_channel = 4 * n_samples * n_channels if n_places > 1 and (weight is not None or bias is not None) else 0
    ledger.work_with(copy_bytes(source, memory_format), per_group, per_group, per_channel, per_channel)
    return out


@instead_of(aten.native_group_norm_backward.default)
def group_norm_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two or three float32 values per channel, and two per group (cuda/group_norm_kernel.cu)."""
    gradient, source, _, _, weight, n_samples, n_channels, n_places, n_groups = args[:9]
    memory_format = _format_of_group_norm(source)
    with ledger.workspace(copy_bytes(gradient, memory_format), copy_bytes(source, memory_format)):
        dense = (one.contiguous(memory_format=memory_format) for one in (gradient, source))
        out = run(func, *dense, *args[2:], **kwargs)
        per_channel, per_group = 4 * n_samples * n_channels if n_places > 1 else 0, 4 * n_samples * n_groups
        for_source = [per_group, per_group, per_channel if weight is not None else 0] if args[9][0] else []
        ledger.work_with(per_channel, per_channel, *for_source)
    return out


def _format_of_group_norm(source: torch.Tensor) -> torch.memory_format:
    return memory_format_of(source) if GROUP_NORM_IS_CHANNELS_LAST else torch.contiguous_format


def _statistics_in_float(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].dtype not in HALF:
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


@instead_of(aten._softmax.default, aten._log_softmax.default)
def softmax(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies a strided input (host_softmax in cuda/SoftMax.cu)."""
    out = run(func, *args, **kwargs)
    ledger.work_with(copy_bytes(args[0]))
    return out


@instead_of(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax multiplies gradient and output first; what is strided is copied (host_softmax_backward, SoftMax.cu)."""
    out = run(func, *args, **kwargs)
    gradient, output = args[:2]
    if func is aten._softmax_backward_data.default:
        product = gradient * output  # on the host: only its sizes and strides are of use
        ledger.work_with(nbytes(product), copy_bytes(product), copy_bytes(output))
    else:
        ledger.work_with(copy_bytes(gradient), copy_bytes(output))
    return out


def _softmax_on_host(func: Any, source: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return func(source.float() if half_to_float else source, dim, False)  # noqa: FBT003, torch's


def _softmax_backward_on_host(func: Any, gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    return func(gradient, output, dim, gradient.dtype).to(dtype)


def _half_on_host(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes in float32 what the host has no kernel for in half precision."""
    dtype = args[0].dtype
    if dtype not in {torch.float16, torch.bfloat16}:
        return func(*args, **kwargs)
    return func(*(one.float() if isinstance(one, torch.Tensor) else one for one in args), **kwargs).to(dtype)


ON_HOST: dict[Any, Callable[..., Any]] = {
    one: partial(compute, one)
    for compute, operators in (
        (_softmax_on_host, (aten._softmax.default, aten._log_softmax.default)),
        (_softmax_backward_on_host, (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)),
        (_half_on_host, (aten.avg_pool3d.default, aten.avg_pool3d_backward.default)),
    )
    for one in operators
}
"""Computes on the host what its kernels refuse and CUDA's do: the softmax from float16 to float32, in one operator, and
average pooling in three dimensions, which LocalResponseNorm is made of, in half precision."""


@instead_of(aten.roll.default)
def roll(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rolls one dimension after the other; a strided input is copied, and the output is contiguous (roll_cuda)."""
    source, shifts = args[:2]
    dims = args[2] if len(args) > 2 else ()  # noqa: PLR2004, its third argument
    if len(dims) > 1:
        source = roll(ledger, run, func, (source, shifts[:1], dims[:1]), kwargs)
        return roll(ledger, run, func, (source, shifts[1:], dims[1:]), kwargs)
    with ledger.workspace(copy_bytes(source)):
        return run(aten.empty_like.default, source, memory_format=torch.contiguous_format)


@instead_of(aten._foreach_norm.Scalar)
def norms(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A float for each chunk of 65,536 elements of the largest tensor, times the tensors (cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    most_chunks = max(-(-one.numel() // 65_536) for one in tensors)
    # One more than there are tensors: measured over stubs with torch 2.15.0, for 1 to 2,000 tensors.
    addresses = 8 * (len(tensors) + 1) if FOREACH_NORM_TAKES_ADDRESSES else 0
    with ledger.workspace(addresses, 4 * len(tensors) * most_chunks):
        return run(func, *args, **kwargs)


@instead_of(aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices_backward.default)
def pool_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient in another memory format than the input is copied (cuda/AveragePool2d.cu, DilatedMaxPool2d.cu)."""
    out = run(func, *args, **kwargs)
    ledger.work_with(copy_bytes(args[0], memory_format_of(args[1])))
    return out


@instead_of(aten._euclidean_dist.default)
def euclidean_distance(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of two matrices, to each of which two columns are added (_euclidean_dist of Distance.cpp)."""
    del ledger, func, kwargs
    one, other = args
    (squares, ones), (other_squares, other_ones) = (_squares_and_ones(run, each) for each in (one, other))
    left = run(aten.cat.default, [run(aten.mul.Tensor, one, -2), squares, ones], -1)
    right = run(aten.cat.default, [other, other_ones, other_squares], -1)
    flat = [each.reshape(-1, *each.shape[-2:]) for each in (left, right.mT)]
    return run(aten.bmm.default, *flat).view(*one.shape[:-1], other.shape[-2])


def _squares_and_ones(run: Run, tensor: torch.Tensor) -> tuple[Any, Any]:
    squares = run(aten.sum.dim_IntList, run(aten.pow.Tensor_Scalar, tensor, 2), [-1], True)  # noqa: FBT003, keepdim
    return squares, run(aten.ones_like.default, squares)
