"""Recognises out-of-memory errors, by the package's one list of their wordings."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

import torch

# Searched in the texts of RuntimeErrors and OSErrors: backends raise those types for everything.
_WORDINGS = re.compile(
    "|".join((  # noqa: FLY002, one line would hide which is which
        # CUDA, HIP and XPU allocators, "MPS backend out of memory", and drivers ("CUDA error: out of memory").
        r"out of memory",
        # The same as a driver's code: CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory's text among HIP's ...
        r"ERROR_OUT_OF_MEMORY",
        # MPSAllocator.mm, where one tensor alone is too large for Metal.
        r"Invalid buffer size: ",
        r"cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        # SYCL and Level Zero, under XPU: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, PI_ERROR_OUT_OF_RESOURCES ...
        r"OUT_OF_(?:DEVICE|HOST)_MEMORY|ERROR_OUT_OF_RESOURCES",
        # c10/core/impl/alloc_cpu.cpp: "can't allocate memory" on Linux, "not enough memory" on Windows.
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"Cannot allocate memory",
        # Libraries that get their handle or workspace outside of torch's allocator.
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|HIPSPARSE|HIPSOLVER)_(?:STATUS_)?ALLOC_FAILED",
        r"rocblas_status_memory_error|miopenStatusAllocFailed",
        # cuDNN 9 tells device from host.
        r"CUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED",
        # What cuDNN says when no algorithm's workspace can be had.
        r"Unable to find a valid cuDNN algorithm",
        r"unable to find an engine to execute this computation",
        r"RESOURCE_EXHAUSTED",  # XLA
    )),
    re.IGNORECASE,
)  # fmt: skip
# "Tried to allocate 20.00 MiB", "you tried to allocate 400 bytes"; Metal's "GB" are 2^30 bytes too.
_TRIED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)
_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
# torch/utils/data/_utils/signal_handling.py and dataloader.py
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by signal|exited unexpectedly)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or any error that led to it, says that memory ran out (see `error_chain`)."""
    return any(says_out_of_memory(one) for one in error_chain(error))


def is_killed_worker(error: BaseException) -> bool:
    """Return whether an error says that a data-loader worker died, as when the kernel kills it for lack of memory."""
    return any(isinstance(one, RuntimeError) and _KILLED_WORKER.search(str(one)) for one in error_chain(error))


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors in its `__cause__` and `__context__` and in exception groups, recursively."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def says_out_of_memory(error: BaseException) -> bool:
    """Return whether an error itself says that memory ran out, regardless of its `__cause__` and `__context__`."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, (RuntimeError, OSError)) and _WORDINGS.search(str(error)) is not None


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the failed allocation in bytes, as the error message states it; None if it states none."""
    for one in error_chain(error):
        found = _TRIED.search(str(one)) if says_out_of_memory(one) else None
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2][0].lower()])
    return None
