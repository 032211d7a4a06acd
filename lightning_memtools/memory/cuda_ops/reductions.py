"""The buffers of CUDA's reductions (sums, means, norms, maxima), where several thread blocks share the work.

A reduction that one thread block cannot do alone is split over blocks, which leave their parts in one buffer and count
in another: `ReduceConfig` and `setReduceConfig` of native/cuda/Reduce.cuh. How many blocks there are depends on the
GPU's multiprocessors. Dimensions are walked in TensorIterator's order (ATen/TensorIterator.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lightning_memtools.memory.cuda_ops.kernels import HALF, Kernel, Run, Workspace, instead_of, nbytes
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
_MAX_THREADS = 512
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256


def workspaces(tensor: torch.Tensor, dims: Sequence[int], gpu: GpuShape, *, part_bytes: int) -> tuple[int, ...]:
    """Return the bytes of the buffers of a reduction: none, or one for the parts and one for the counts.

    Args:
        tensor: What is reduced.
        dims: The dimensions that go; none for all.
        gpu: The GPU.
        part_bytes: The bytes of what a block leaves of each output.
    """
    if tensor.numel() == 0:
        return ()
    shape, strides, n_reduced = _walked(tensor, dims)
    n_outputs = prod(shape[n_reduced:])
    n_inputs = prod(shape[:n_reduced])
    fastest = not shape or n_reduced == len(shape) or (n_reduced > 0 and strides[0] < strides[n_reduced])
    if shape and n_reduced == 0:
        fastest = False
    width, height = (n_inputs, n_outputs) if fastest else (n_outputs, n_inputs)
    vector = 1
    stride = (strides[0] if fastest else strides[n_reduced]) if shape else 1
    if stride == 1:
        if fastest and width > 128 and len(shape) == 1:  # noqa: PLR2004, setReduceConfig
            width //= 4
        elif not fastest:
            vector = _vector_of_outputs(shape, strides, n_reduced)
            width //= vector
    most = _MAX_THREADS // vector
    wide, high = min(power_of_two(width), most), min(power_of_two(height), most)
    block_width = min(wide, _WARP)
    block_height = min(high, most // block_width)
    block_width = min(wide, most // block_height)
    in_step = block_width if fastest else 1
    out_step = 1 if fastest else block_width
    values = -(-n_inputs // in_step)
    splits_height = values >= min(block_height * 16, _MOST_VALUES)
    if splits_height:
        in_step *= block_height
    else:
        out_step *= block_height
    values = -(-n_inputs // in_step)
    grid = -(-(n_outputs // vector) // out_step)
    target = gpu.multiprocessors * (gpu.threads // (block_width * block_height))
    if not (splits_height and values >= _MOST_VALUES and grid <= target):
        return ()
    blocks = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return ()
    return part_bytes * n_outputs * blocks * (1 if fastest else block_width * vector), 4 * grid


def bytes_of_sum(dtype: torch.dtype) -> int:
    """Return the bytes that a block leaves of each sum."""
    return 4 if dtype in HALF else dtype.itemsize


def _walked(tensor: torch.Tensor, dims: Sequence[int]) -> tuple[list[int], list[int], int]:  # noqa: C901
    """Return shape and strides of the input as TensorIterator walks it, and how many leading dimensions are reduced."""
    n = tensor.dim()
    reduced = {dim % n for dim in dims} if dims and n else set(range(n))
    shape = list(tensor.shape)
    results, step = [0] * n, 1
    for dim in reversed(range(n)):
        if dim not in reduced:
            results[dim] = step
            step *= shape[dim]
    inputs = list(tensor.stride())
    order = list(reversed(range(n)))
    for i in range(1, n):
        at = i
        for before in reversed(range(i)):
            wrong = _compared(order[before], order[at], results, inputs, shape)
            if wrong > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif wrong < 0:
                break
    walked: list[list[int]] = []  # size, stride of the input, stride of the result
    for dim in order:
        size, source, result = shape[dim], inputs[dim], results[dim]
        last = walked[-1] if walked else None
        if last is None:
            walked.append([size, source, result])
        elif last[0] == 1:
            walked[-1] = [size, source, result]
        elif size == 1:
            continue
        elif last[0] * last[1] == source and last[0] * last[2] == result:
            last[0] *= size
        else:
            walked.append([size, source, result])
    return [one[0] for one in walked], [one[1] for one in walked], sum(one[2] == 0 for one in walked)


def _compared(one: int, other: int, results: list[int], inputs: list[int], shape: list[int]) -> int:
    """Return 1 if the two dimensions have to be swapped, -1 if they must not be, 0 if it does not matter."""
    if (results[one] == 0) != (results[other] == 0):
        return 1 if results[other] == 0 else -1
    for strides in (results, inputs):
        first, second = strides[one], strides[other]
        if first == 0 or second == 0:
            continue
        if first != second:
            return -1 if first < second else 1
        if shape[one] > shape[other]:
            return 1
    return 0


def _vector_of_outputs(shape: list[int], strides: list[int], n_reduced: int) -> int:
    vector = 4
    for number in (shape[n_reduced], *(stride for i, stride in enumerate(strides) if i != n_reduced)):
        while number % vector:
            vector //= 2
    return vector


def power_of_two(number: int) -> int:
    """Return the largest power of two that is not above the number."""
    return 1 << (max(number, 1).bit_length() - 1)


@instead_of(aten.logsumexp.default)
def logsumexp(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The maxima, and the exponentials of the differences to them (logsumexp_out_impl in ReduceOps.cpp)."""
    out = run(func, *args, **kwargs)
    with ledger.workspace(nbytes(out)):
        ledger.work_with(nbytes(args[0]))
    return out


def reduction_kernels(gpu: GpuShape) -> dict[Any, Kernel]:
    """Return the reductions, as kernels to call in place of their operators."""

    def kernel(dims_at: int | None, part_bytes: Callable[[torch.dtype], int]) -> Kernel:
        def reduce(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = run(func, *args, **kwargs)
            given = args[dims_at] if dims_at is not None and len(args) > dims_at else kwargs.get("dim")
            dims = () if given is None else (given,) if isinstance(given, int) else tuple(given)
            result = out[0] if isinstance(out, tuple) else out
            source = args[0]
            in_half = source.dtype in HALF and result.dtype is torch.float32
            copied = () if source.dtype is result.dtype or in_half or func in _ANY_TYPE else (
                nbytes(source) // source.element_size() * result.element_size(),
            )  # fmt: skip
            dtype = source.dtype if in_half or func in _ANY_TYPE else result.dtype
            ledger.work_with(*copied, *workspaces(source, dims, gpu, part_bytes=part_bytes(dtype)))
            return out

        return reduce

    sums, whole = kernel(1, bytes_of_sum), kernel(None, bytes_of_sum)
    largest, with_index = kernel(1, lambda dtype: dtype.itemsize), kernel(1, lambda _: 16)
    return {
        aten.sum.default: whole, aten.sum.dim_IntList: sums,
        aten.mean.default: whole, aten.mean.dim: sums,
        aten.nansum.default: sums, aten.prod.default: whole, aten.prod.dim_int: sums,
        aten.linalg_vector_norm.default: kernel(2, bytes_of_sum),
        aten.amax.default: largest, aten.amin.default: largest,
        aten.max.default: kernel(None, lambda dtype: dtype.itemsize),
        aten.min.default: kernel(None, lambda dtype: dtype.itemsize),
        aten.max.dim: with_index, aten.min.dim: with_index,
        aten.argmax.default: with_index, aten.argmin.default: with_index,
        aten.var.correction: with_index, aten.std.correction: with_index,
        aten.var_mean.correction: with_index, aten.std_mean.correction: with_index,
    }  # fmt: skip


# Reductions whose result is of another type without a copy of the input.
_ANY_TYPE = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}
