"""CUDA's texts: the out-of-memory error, and the table of ``torch.cuda.memory_summary``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.sizes import GIB, KIB, MIB

ONE_EXABYTE = 2**60
MARK = "(simulated by lightning_memtools.VirtualDevice)"


def cuda_error(failure: SimulatedOutOfMemory, *, context: int) -> torch.OutOfMemoryError:
    """Return the error that torch raises on a GPU, with its text and `MARK` at the end.

    Args:
        failure: The allocator's failure.
        context: Bytes of the CUDA context, which ``failure.used_by_others`` contains: CUDA's text counts them as this
            process's own.
    """
    others = failure.used_by_others - context
    # The text of CUDACachingAllocator.cpp, piece by piece, as in the strings of libc10_cuda.so of torch 2.13 and 2.11;
    # some pieces are separated by two spaces there.
    pieces = [
        f"CUDA out of memory. Tried to allocate {cuda_size(failure.segment_size)}.",
        f" GPU 0 has a total capacity of {cuda_size(failure.capacity or 0)}",
        f" of which {cuda_size(max(failure.free or 0, 0))} is free.",
        # The text names each process. All others together are one here, with a number that no process has.
        f" Process 0 has {cuda_size(others)} memory in use." if others > 0 else "",
        f" Including non-PyTorch memory, this process has {cuda_size(failure.reserved + context)} memory in use.",
        f" {cuda_size(failure.allowed)} allowed;" if failure.allowed is not None else "",
        f" Of the allocated memory {cuda_size(failure.allocated)} is allocated by PyTorch,",
        f" and {cuda_size(failure.reserved - failure.allocated)} is reserved by PyTorch but unallocated.",
        " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to",
        " avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/",
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)",
        f" {MARK}",
    ]
    return torch.OutOfMemoryError("".join(pieces))


def too_large_error() -> torch.OutOfMemoryError:
    """Return the error for `ONE_EXABYTE` or more, which CUDACachingAllocator.cpp refuses before it looks for memory."""
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate more than 1EB memory. {MARK}")


def cuda_size(n_bytes: int) -> str:
    """Return a size as the CUDA allocator prints it: with two decimals, and in the smaller unit up to 1024 of it."""
    if n_bytes <= KIB:
        return f"{n_bytes} bytes"
    if n_bytes <= MIB:
        return f"{n_bytes / KIB:.2f} KiB"
    if n_bytes <= GIB:
        return f"{n_bytes / MIB:.2f} MiB"
    return f"{n_bytes / GIB:.2f} GiB"


_ROWS = (
    ("Allocated memory", "allocated_bytes"),
    ("Active memory", "active_bytes"),
    ("Requested memory", "requested_bytes"),
    ("GPU reserved memory", "reserved_bytes"),
    ("Non-releasable memory", "inactive_split_bytes"),
    ("Allocations", "allocation"),
    ("Active allocs", "active"),
    ("GPU reserved segments", "segment"),
    ("Non-releasable allocs", "inactive_split"),
)
_POOLS = (("      from large pool", "large_pool"), ("      from small pool", "small_pool"))
_COLUMNS = (("Cur Usage", "current"), ("Peak Usage", "peak"), ("Tot Alloc", "allocated"), ("Tot Freed", "freed"))
_WIDTH = 75


def summary_table(stats: Mapping[str, int], *, title: str) -> str:
    """Return a table of allocator statistics as torch prints it.

    Args:
        stats: Values under the names of ``torch.cuda.memory_stats``.
        title: The heading, which is centred.
    """
    counts = f"CUDA OOMs: {stats['num_ooms']:<12d} | cudaMalloc retries: {stats['num_alloc_retries']:<8d}"
    columns = " | ".join(f"{name:<10}" for name, _ in _COLUMNS)
    lines = ["=" * _WIDTH, title.center(_WIDTH), "-" * _WIDTH, counts.center(_WIDTH), "=" * _WIDTH]
    lines.append(f" {'       Metric':<21} | {columns} ")
    for name, metric in _ROWS:
        lines.append("-" * _WIDTH)
        totals = [stats[f"{metric}.all.{kind}"] for _, kind in _COLUMNS]
        write = _size if metric.endswith("bytes") else _count
        for row_name, pool in ((name, "all"), *_POOLS):
            values = (stats[f"{metric}.{pool}.{kind}"] for _, kind in _COLUMNS)
            cells = " | ".join(write(value, total) for value, total in zip(values, totals, strict=True))
            lines.append(f" {row_name:<21} | {cells} ")
    lines.append("=" * _WIDTH)
    return "".join(f"|{line}|\n" for line in lines)


def _size(n_bytes: int, scale: int) -> str:
    """Return a size in the unit in which ``scale`` has at most six digits; all rows of one metric share it."""
    unit = 0
    units = ("B  ", "KiB", "MiB", "GiB", "TiB", "PiB")
    # The threshold is torch's.
    while scale >= 768 * 1024 and unit < len(units) - 1:
        scale //= 1024
        n_bytes //= 1024
        unit += 1
    return f"{n_bytes:6d} {units[unit]}"


def _count(number: int, scale: int) -> str:
    unit = 0
    units = (" ", "K", "M")
    while scale >= 750 * 1000 and unit < len(units) - 1:
        scale //= 1000
        number //= 1000
        unit += 1
    return f"{number:7d} {units[unit]} "
