"""The buffers of reductions, beside those that PyTorch's own kernels ask for."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lightning_memtools._torch import cuda_memory_snapshot, record_cuda_history, stop_cuda_history
from lightning_memtools.memory.cuda_ops.reductions import workspaces
from lightning_memtools.memory.sizes import GpuShape

pytestmark = pytest.mark.cuda_memory

SHAPES = [(2048, 4096), (4096, 10), (100_000, 64), (8, 64, 56, 56), (2_097_152,), (3, 5, 7, 100_000), (12, 1023, 77)]
# How each is called, how many tensors it returns, and the bytes that a block leaves of each output.
REDUCTIONS = {
    "sum": (lambda x, dims: x.sum(dims), 1, 4),
    "mean": (lambda x, dims: x.mean(dims), 1, 4),
    "vector norm": (lambda x, dims: torch.linalg.vector_norm(x, dim=dims), 1, 4),
    "variance": (lambda x, dims: x.var(dims), 1, 16),
    "argmax": (lambda x, dims: x.argmax(dims[0]), 1, 16),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_pytorchs_own_kernels(name, dtype):
    reduce, n_results, part_bytes = REDUCTIONS[name]
    properties = torch.cuda.get_device_properties(0)
    gpu = GpuShape(properties.multi_processor_count, properties.max_threads_per_multi_processor)
    n_with_buffers = 0
    for shape in SHAPES:
        for memory_format in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 4 else 1]:
            x = torch.empty(shape, dtype=dtype, device="cuda").to(memory_format=memory_format)
            for n in range(1, 2 if name == "argmax" else len(shape) + 1):
                for dims in combinations(range(len(shape)), n):
                    asked = requests(lambda reduce=reduce, x=x, dims=dims: reduce(x, dims))
                    expected = workspaces(x, dims, gpu, part_bytes=part_bytes)
                    assert tuple(asked[n_results:]) == expected, (shape, dims, memory_format)
                    n_with_buffers += bool(expected)
    # Of the shapes above, on every GPU of the table that torch still serves; argmax takes one dimension only.
    assert n_with_buffers == (3 if name == "argmax" else 29)


def requests(run):
    """The bytes of each request to CUDA's allocator."""
    record_cuda_history(1000)
    try:
        run()
        return [one["size"] for one in cuda_memory_snapshot()["device_traces"][0] if one["action"] == "alloc"]
    finally:
        stop_cuda_history()
