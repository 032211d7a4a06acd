"""Embeddings and indexing, whose gradients sort the indices (cuda/Embedding.cu, EmbeddingBag.cu, Indexing.cu)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any

import torch

from lightning_memtools._torch import in_backward
from lightning_memtools.memory.cuda_ops.kernels import Run, Workspace, copy_bytes, instead_of, nbytes

aten = torch.ops.aten
_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072
_MEAN, _MAX = 1, 2


@instead_of(aten.embedding.default)
def embedding(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies strided indices (Embedding.cpp)."""
    with ledger.workspace(copy_bytes(args[1])):
        return run(func, *args, **kwargs)


@instead_of(aten.embedding_dense_backward.default)
def embedding_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """More than 3072 indices are sorted, and summed in float32 piece by piece. What is strided is copied."""
    gradient, indices, n_weights = args[:3]

    def make() -> Any:
        return run(func, *args, **kwargs)

    with ledger.workspace(copy_bytes(gradient), copy_bytes(indices)):
        return make() if indices.numel() <= _FEW_INDICES else _sum_sorted(ledger, make, indices, n_weights, gradient)


@instead_of(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocates the bag of each index, the size of each bag and, for the maximum, the indices of the largest."""
    del func, ledger
    names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
             "include_last_offset", "padding_idx")  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, indices, offsets, mode = given["weight"], given["indices"], given["offsets"], given.get("mode", 0)
    n_bags, width = offsets.numel() - bool(given.get("include_last_offset")), weight.shape[1]

    def integers(*shape: int) -> Any:
        return run(aten.empty.memory_format, shape, dtype=indices.dtype, device=torch.device("cpu"))

    sizes, bags = integers(n_bags), integers(indices.numel())
    out = run(aten.empty.memory_format, [n_bags, width], dtype=weight.dtype, device=torch.device("cpu"))
    return out, bags, sizes, integers(n_bags, width) if mode == _MAX else torch.empty(0, dtype=indices.dtype)


@instead_of(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def bag_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sorts any number of indices, except for the maximum."""
    gradient, indices = args[:2]
    is_dense = func is aten._embedding_bag_dense_backward.default
    n_weights, mode = (args[5], args[7]) if is_dense else (args[6], args[8])
    if not is_dense and args[9]:  # a sparse gradient
        return run(func, *args, **kwargs)

    def make() -> Any:
        shape = [n_weights, gradient.shape[-1]]
        return run(aten.zeros.default, shape, dtype=gradient.dtype, device=torch.device("cpu"))

    return make() if mode == _MAX else _sum_sorted(ledger, make, indices, n_weights, gradient)


@instead_of(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def index_put(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices become places and are sorted if values are added (index_put_with_sort_kernel).

    The gradient of indexing is added to zeros in place. torch does that out of place for fake tensors, which could be
    of a class that does not allow it.
    """
    target, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)  # noqa: PLR2004, its place
    if func is aten.index_put.default and in_backward() and not torch.is_grad_enabled():
        func = aten.index_put_.default
    used = [one for one in indices if one is not None]
    if not accumulates or any(one.dtype in {torch.bool, torch.uint8} for one in used):
        return run(func, *args, **kwargs)
    n = prod(torch.broadcast_shapes(*(one.shape for one in used)))  # type: ignore[no-untyped-call]
    rows = prod(target.shape[: len(indices)])
    expanded = n * target.numel() // max(rows, 1) * target.element_size()
    with ExitStack() as places:
        with ledger.workspace(8 * n):
            places.enter_context(ledger.workspace(8 * n))
        for _ in used[1:]:
            ledger.work_with(8 * n, 8 * n)
        copied = copy_bytes(values) if nbytes(values) >= expanded else expanded
        with ledger.workspace(copied, 8 * n, 8 * n):
            ledger.work_with(8 * n, _sort_bytes(n, rows, 8))
    return run(func, *args, **kwargs)


def _sum_sorted(
    ledger: Workspace, make: Callable[[], Any], indices: torch.Tensor, n_weights: int, gradient: torch.Tensor
) -> Any:
    """Sort the indices and sum equal ones in parts of ten (embedding_backward_cuda_kernel)."""
    n, width = indices.numel(), indices.element_size()
    all_bytes, n_runs = n * width, min(n, n_weights)
    n_parts = n // _ROWS_PER_THREAD + n_runs
    with ledger.workspace(all_bytes, all_bytes):  # sorted, and where each was
        ledger.work_with(all_bytes, _sort_bytes(n, n_weights, width))
        out = make()
        with ledger.workspace(all_bytes, 8):  # where runs of equal indices begin, and how many there are
            ledger.work_with(all_bytes, _scan_bytes(n, 1408, width))
            with ledger.workspace(n_runs * width, n_runs * width):  # parts of each run, and their starts
                ledger.work_with(_scan_bytes(n_runs, 896, width))
                ledger.work_with(8, n_parts * width, 4 * n_parts * gradient.shape[-1])
    return out


# The temporary storage of CUB's algorithms, each part of which is rounded up to 256 bytes; the sizes of tiles are those
# of compute capability 8.0 for indices of 8 bytes.
_SINGLE_TILE, _SORT_TILE, _RADIX = 2304, 3840, 256


def _sort_bytes(n: int, n_weights: int, width: int) -> int:
    if n <= _SINGLE_TILE * 8 // width:
        return 1
    n_passes = -(-max(n_weights, 1).bit_length() // 8)
    n_tiles = -(-n // (_SORT_TILE * 8 // width))
    copies = 2 * _rounded(n * width) if n_passes > 1 else 0
    return 8 * _RADIX * n_passes + 4 * _RADIX * n_tiles + copies + 256 + 255


def _scan_bytes(n: int, tile: int, width: int) -> int:
    descriptor = 16 if width == 8 else 8  # noqa: PLR2004, a value and its state are read at once
    return _rounded((32 + -(-n // tile)) * descriptor) + 256 + 255


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // 256) * 256
