"""The published runs with PyTorch's own CUDA allocator, beside their estimates."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.simulation.cuda_ops.kernels import GpuShape
from tests.estimate.published import predicted_reserved, real_reserved, runs


@pytest.mark.cuda_memory
@pytest.mark.parametrize("index", range(4))
def test_a_published_run_is_estimated_to_the_byte(index):
    run = runs()[index]
    properties = torch.cuda.get_device_properties(0)
    gpu = GpuShape(
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
        (properties.major, properties.minor),
    )
    real = real_reserved(run)
    assert predicted_reserved(run, gpu) == real
