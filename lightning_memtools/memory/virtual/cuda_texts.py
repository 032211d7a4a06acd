"""The text of CUDA's out-of-memory error."""

from __future__ import annotations

import torch

from lightning_memtools.memory.allocator import SimulatedOutOfMemory
from lightning_memtools.memory.sizes import GIB, KIB, MIB

MARK = "(simulated by lightning_memtools.VirtualDevice)"


def cuda_error(failure: SimulatedOutOfMemory, *, context: int) -> torch.OutOfMemoryError:
    """Return the error that torch would raise on a GPU, with the same text and a remark that the error is simulated.

    Args:
        failure: The allocator's failure.
        context: The bytes of the CUDA context, which are part of ``failure.used_by_others``. The text counts them as
            memory of this process.
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


def cuda_size(n_bytes: int) -> str:
    """Return a size as the CUDA allocator prints it: two decimals, in the smallest unit that keeps it at most 1024."""
    if n_bytes <= KIB:
        return f"{n_bytes} bytes"
    if n_bytes <= MIB:
        return f"{n_bytes / KIB:.2f} KiB"
    if n_bytes <= GIB:
        return f"{n_bytes / MIB:.2f} MiB"
    return f"{n_bytes / GIB:.2f} GiB"
