"""The buffers of CUDA's reductions (sums, means, norms, maxima), where several thread blocks share the work.

A reduction that one thread block cannot do alone is split over blocks (CTAs), which leave their parts in one buffer and
count in another. `ReduceConfig` and `workspaces` are ReduceConfig and setReduceConfig of native/cuda/Reduce.cuh, with
their names; `_walked` is TensorIterator's order of dimensions (ATen/TensorIterator.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

import torch

from lightning_memtools.memory.cuda_ops.rules import HALF, Call, Rule
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
MAX_NUM_THREADS = 512
WARP_SIZE = 32
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
INPUT_VEC_SIZE = 4


@dataclass(slots=True)
class ReduceConfig:
    """Division of a reduction among the threads, warps and blocks of a CUDA kernel. Names are as in PyTorch."""

    element_size_bytes: int
    num_outputs: int
    num_inputs: int
    output_vec_size: int = 1
    step_input: int = 1
    step_output: int = 1
    ctas_per_output: int = 1
    block_width: int = 1
    block_height: int = 1
    block_x_reduce: bool = False

    def set_block_dimension(self, dim0: int, dim1: int) -> None:
        """Choose the width and height of a thread block for a problem of `dim0` by `dim1` elements."""
        max_num_threads = MAX_NUM_THREADS // self.output_vec_size
        last_pow2s = (1 << (max(dim, 1).bit_length() - 1) for dim in (dim0, dim1))
        dim0_pow2, dim1_pow2 = (min(last_pow2, max_num_threads) for last_pow2 in last_pow2s)
        self.block_width = min(dim0_pow2, WARP_SIZE)
        self.block_height = min(dim1_pow2, max_num_threads // self.block_width)
        self.block_width = min(dim0_pow2, max_num_threads // self.block_height)

    @property
    def values_per_thread(self) -> int:
        """The number of inputs that a thread reduces."""
        return _div_up(self.num_inputs, self.step_input)

    @property
    def grid(self) -> int:
        """The number of thread blocks among which the outputs are divided."""
        return _div_up(self.num_outputs // self.output_vec_size, self.step_output)

    @property
    def global_memory_size(self) -> int:
        """The size in bytes of the buffer for the partial results of all blocks."""
        size = self.element_size_bytes * self.num_outputs * self.ctas_per_output
        return size if self.block_x_reduce else size * self.block_width * self.output_vec_size


def workspaces(tensor: torch.Tensor, dims: Sequence[int], gpu: GpuShape, *, part_bytes: int) -> tuple[int, ...]:
    """Return the sizes in bytes of a reduction's buffers: partial results and semaphores; () if it needs neither.

    Args:
        tensor: The input.
        dims: The dimensions that are reduced; empty for all.
        gpu: The GPU.
        part_bytes: The size in bytes of one partial result.
    """
    if tensor.numel() == 0:
        return ()
    shape, strides, n_reduced = _walked(tensor, dims)
    config = ReduceConfig(part_bytes, num_outputs=prod(shape[n_reduced:]), num_inputs=prod(shape[:n_reduced]))
    is_whole = n_reduced == len(shape)
    reduction_on_fastest_striding_dimension = is_whole or (n_reduced > 0 and strides[0] < strides[n_reduced])
    if reduction_on_fastest_striding_dimension:
        dim0, dim1, fastest_moving_stride = config.num_inputs, config.num_outputs, (strides or [1])[0]
    else:
        dim0, dim1, fastest_moving_stride = config.num_outputs, config.num_inputs, strides[n_reduced]
    if fastest_moving_stride == 1:
        if not reduction_on_fastest_striding_dimension:
            config.output_vec_size = _output_vec_size(shape, strides, n_reduced)
            dim0 //= config.output_vec_size
        elif dim0 > 128 and len(shape) == 1:  # noqa: PLR2004, setReduceConfig
            dim0 //= INPUT_VEC_SIZE
    config.set_block_dimension(dim0, dim1)
    config.block_x_reduce = reduction_on_fastest_striding_dimension
    if config.block_x_reduce:
        config.step_input *= config.block_width
    else:
        config.step_output *= config.block_width
    split_across_warps = config.values_per_thread >= min(config.block_height * 16, MAX_VALUES_PER_THREAD)
    if split_across_warps:
        config.step_input *= config.block_height
    else:
        config.step_output *= config.block_height
    blocks_per_sm = gpu.threads // (config.block_width * config.block_height)
    target_grid_size = gpu.multiprocessors * blocks_per_sm
    values = config.values_per_thread
    if split_across_warps and values >= MAX_VALUES_PER_THREAD and config.grid <= target_grid_size:
        filling = min(_div_up(target_grid_size, config.grid), _div_up(values, MIN_VALUES_PER_THREAD))
        config.ctas_per_output = max(filling, _div_up(values, MAX_VALUES_PER_THREAD))
    return (config.global_memory_size, 4 * config.grid) if config.ctas_per_output > 1 else ()


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


def _output_vec_size(shape: list[int], strides: list[int], n_reduced: int) -> int:
    vec_size = 4
    for number in (shape[n_reduced], *(stride for i, stride in enumerate(strides) if i != n_reduced)):
        while number % vec_size:
            vec_size //= 2
    return vec_size


def _walked(tensor: torch.Tensor, dims: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Sort and merge dimensions as TensorIterator does. Return sizes, strides and the number of reduced dimensions."""
    n = tensor.dim()
    reduced = {dim % n for dim in dims} if dims and n else set(range(n))
    shape, inputs = list(tensor.shape), list(tensor.stride())
    results = _strides_of_result(shape, reduced)
    order = _order(results, inputs, shape)
    walked: list[list[int]] = []  # size, stride of the input, stride of the result
    for dim in order:
        size, source, result = shape[dim], inputs[dim], results[dim]
        last = walked[-1] if walked else None
        if last is not None and last[0] == 1:
            walked[-1] = [size, source, result]
        elif last is not None and last[0] * last[1] == source and last[0] * last[2] == result:
            last[0] *= size
        elif last is None or size != 1:
            walked.append([size, source, result])
    return [one[0] for one in walked], [one[1] for one in walked], sum(one[2] == 0 for one in walked)


def _strides_of_result(shape: list[int], reduced: set[int]) -> list[int]:
    """Return the strides of a reduction's dense result, with stride 0 for each reduced dimension."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        if dim not in reduced:
            strides[dim] = step
            step *= shape[dim]
    return strides


def _order(results: list[int], inputs: list[int], shape: list[int]) -> list[int]:
    """Sort dimensions like TensorIterator, innermost first, given the result's strides and the input's strides."""
    order = list(reversed(range(len(shape))))
    for i in range(1, len(shape)):
        at = i
        for before in reversed(range(i)):
            wrong = _compared(order[before], order[at], results, inputs, shape)
            if wrong > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif wrong < 0:
                break
    return order


def _compared(one: int, other: int, results: list[int], inputs: list[int], shape: list[int]) -> int:
    """Compare strides of dimensions: -1 if the loop over `one` belongs inside that over `other`, else 1; 0: tie."""
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


def _rule(dims_at: int | None, part_bytes: Callable[[torch.dtype], int], *, any_type: bool = False) -> Rule:
    """Return a function that runs a reduction and allocates the temporary buffers of its CUDA kernel.

    Args:
        dims_at: The position of the operator's argument that lists the reduced dimensions; None if all are reduced.
        part_bytes: Returns the size in bytes of one partial result for a given dtype.
        any_type: Whether the kernel can write a result of any dtype without first casting the whole input.
    """

    def reduce(call: Call) -> Any:
        out, source = call.results(), call.args[0]
        given = None if dims_at is None else call.argument(dims_at, "dim")
        dims = () if given is None else (given,) if isinstance(given, int) else tuple(given)
        result = out[0] if isinstance(out, tuple) else out
        is_direct = any_type or source.dtype is result.dtype
        is_direct |= source.dtype in HALF and result.dtype is torch.float32
        copied = 0 if is_direct else source.numel() * result.element_size()
        dtype = source.dtype if is_direct else result.dtype
        call.hold(copied, *workspaces(source, dims, call.gpu, part_bytes=part_bytes(dtype)))
        return out

    return reduce


def _bytes_of_sum(dtype: torch.dtype) -> int:
    return 4 if dtype in HALF else dtype.itemsize


_bytes_of_value = attrgetter("itemsize")
_WHOLE = (aten.sum.default, aten.mean.default, aten.prod.default)
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.nansum.default, aten.prod.dim_int)
_VARIANCES = (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
_INDICES = (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
REDUCTIONS: dict[Any, Rule] = {
    **dict.fromkeys(_WHOLE, _rule(None, _bytes_of_sum)),
    **dict.fromkeys(_SUMS, _rule(1, _bytes_of_sum)),
    aten.linalg_vector_norm.default: _rule(2, _bytes_of_sum),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _rule(1, _bytes_of_value)),
    **dict.fromkeys((aten.max.default, aten.min.default), _rule(None, _bytes_of_value)),
    **dict.fromkeys(_INDICES, _rule(1, lambda _: 16, any_type=True)),
    **dict.fromkeys(_VARIANCES, _rule(1, lambda _: 16)),
}
