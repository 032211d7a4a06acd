"""Pinned memory as PyTorch's own allocator of host memory reports it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memtools import MemoryMonitor
from lightning_memtools.memory.host_memory import read_host_memory
from lightning_memtools.memory.sizes import GIB, MIB
from tests.event_files import scalars
from tests.lightning_models import Regression, loader, trainer

pytestmark = pytest.mark.cuda_memory


def test_pinned_memory_is_what_torch_holds():
    torch.cuda.init()
    torch._C._host_emptyCache()  # what other tests left
    before = read_host_memory().pinned
    assert before is not None
    block = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    assert block.is_pinned()
    now = read_host_memory()
    assert now.pinned == before + 64 * MIB
    assert f"pinned {now.pinned / MIB:.0f}" in now.describe().replace(".0", "")


def test_batches_that_are_pinned_are_logged(tmp_path):
    run = trainer(tmp_path, MemoryMonitor(), accelerator="gpu", devices=1)
    held = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    run.fit(Regression(), DataLoader(loader().dataset, batch_size=8, pin_memory=True))
    assert held.is_pinned()
    logged = [value for _, value in scalars(run.log_dir)["memory/host/pinned_gib"]]
    assert logged
    assert min(logged) >= 32 * MIB / GIB
