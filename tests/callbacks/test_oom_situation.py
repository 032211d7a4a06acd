from __future__ import annotations

import pytest
import torch

from lightning_memtools.callbacks._oom_situation import _kind_of
from lightning_memtools.estimate.memory_estimate import cublas_workspace_of


@pytest.mark.parametrize(("capability", "workspace"), [((9, 0), "32MiB"), ((10, 0), "32MiB"), ((8, 0), "8519680B")])
def test_a_trace_gives_cublas_what_the_failed_gpu_gives_it(capability, workspace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert cublas_workspace_of(_kind_of(torch.device("cuda", 0))) == workspace
    assert _kind_of(torch.device("cpu")) is None
