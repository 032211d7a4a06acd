from __future__ import annotations

import pytest
import torch

from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.sizes import MIB, GpuShape, find_gpu
from lightning_memtools.oom.failed_step import _gpu_like


@pytest.mark.parametrize(("capability", "workspace"), [((9, 0), 32 * MIB), ((10, 0), 32 * MIB), ((8, 0), 8_519_680)])
def test_a_trace_gives_cublas_what_the_failed_gpu_gives_it(capability, workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GPU of next year")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = GpuShape.of(find_gpu(_gpu_like(torch.device("cuda", 0))))
    assert cublas_workspace_bytes(compute_capability=gpu.compute_capability) == workspace
    assert _gpu_like(torch.device("cpu")) is None


@pytest.mark.parametrize(("name", "gpu"), [("Tesla T4", "T4 16GB"), ("NVIDIA L4 (dry run)", "L4 24GB")])
def test_a_trace_runs_the_kernels_of_the_failed_gpu(name, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert _gpu_like(torch.device("cuda", 0)) == gpu
