from __future__ import annotations

import pytest
import torch

from lightning_memtools.oom.failed_step import _name_of_gpu


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA GPU of next year", None), ("Tesla T4", "T4 16GB"), ("NVIDIA L4 (dry run)", "L4 24GB")]
)
def test_a_trace_runs_the_kernels_of_the_failed_gpu(name, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert _name_of_gpu(torch.device("cuda", 0)) == gpu
