"""Pinned memory as PyTorch's own allocator of host memory reports it."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import MemoryMonitor
from lightning_memtools.memory.host_memory import read_host_memory
from lightning_memtools.memory.sizes import GIB, MIB
from tests.event_files import scalars
from tests.lightning_models import Regression

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
    data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
    run = L.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[MemoryMonitor()],
    )  # fmt: skip
    held = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    run.fit(Regression(), DataLoader(data, batch_size=8, pin_memory=True))
    assert held.is_pinned()
    logged = [value for _, value in scalars(run.log_dir)["memory/host/pinned_gib"]]
    assert logged
    assert min(logged) >= 32 * MIB / GIB
