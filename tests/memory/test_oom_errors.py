from __future__ import annotations

import errno

import pytest
import torch

from lightning_memtools.memory.oom_errors import is_killed_worker, is_out_of_memory, requested_bytes
from lightning_memtools.memory.virtual import VirtualDevice

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 1 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 400 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("Invalid buffer size: 24.00 GiB"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: str(e)[:40])
def test_every_wording_of_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)
    assert not is_killed_worker(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear with a non-contiguous input."),
        ValueError("out of memory"),  # nobody's allocator raises this type
        KeyError("CUDA out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=str,
)
def test_other_errors_are_not_recognised_as_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_an_out_of_memory_error_is_found_in_causes_contexts_and_groups():
    def raised_from() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except RuntimeError as error:
            raise ValueError("the forward pass failed") from error

    def while_handling() -> None:
        try:
            raised_from()
        except ValueError:
            raise KeyError("clean-up failed")  # noqa: B904, the context is what is tested

    for function in (raised_from, while_handling):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            function()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(ExceptionGroup("two ranks", [ValueError("x"), MemoryError()]))


def test_the_simulated_error_and_the_cpu_allocators_own():
    with VirtualDevice("4MiB"), pytest.raises(RuntimeError) as simulated:
        torch.empty(8 << 20, dtype=torch.uint8)
    assert is_out_of_memory(simulated.value)
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 4242) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 4242, 4243) exited unexpectedly",
    ],
)
def test_a_killed_worker_is_recognised(text):
    assert is_killed_worker(RuntimeError(text))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB", 20 * 2**20),
        ("MPS backend out of memory (MPS allocated: 1 GB). Tried to allocate 1.50 GB on private pool.", 3 * 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error code 12", 400),
        ("CUDA error: out of memory", None),
        ("Tried to allocate 20.00 MiB of something else", None),
    ],
)
def test_the_request_is_read_from_an_errors_text(text, n_bytes):
    error = ValueError("while handling")
    error.__cause__ = RuntimeError(text)
    assert requested_bytes(error) == n_bytes
