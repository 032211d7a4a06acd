from __future__ import annotations

import pytest
import torch

from lightning_memtools.estimate.memory_estimate import cublas_workspace_of
from lightning_memtools.oom.failed_step import _gpu_like


@pytest.mark.parametrize(("capability", "workspace"), [((9, 0), "32MiB"), ((10, 0), "32MiB"), ((8, 0), "8519680B")])
def test_a_trace_gives_cublas_what_the_failed_gpu_gives_it(capability, workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cublas_workspace_of(_gpu_like(torch.device("cuda", 0))) == workspace
    assert _gpu_like(torch.device("cpu")) is None
