"""MemoryMonitor(snapshot_at_step=...) on PyTorch's own allocator."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import MemoryMonitor
from lightning_memtools._torch import is_cuda_history_recorded
from lightning_memtools.cli.main import main
from lightning_memtools.tensorboard_plugin.snapshot_file import read_snapshot
from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from
from tests.lightning_models import trainer
from tests.null_cuda.null_processes import Classifier
from tests.zoo import torchvision_models

pytestmark = pytest.mark.cuda_memory


class Reads(L.Callback):
    """The allocated bytes at the phases of step 2."""

    def __init__(self) -> None:
        self.allocated: dict[str, int] = {}

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 2:
            self.allocated["backward"] = torch.cuda.memory_allocated()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 2:
            self.allocated["optimizer"] = torch.cuda.memory_allocated()


def test_a_real_step_has_its_phases_its_modules_and_what_each_block_is(tmp_path):
    data = TensorDataset(torch.zeros(16, 3, 224, 224), torch.zeros(16, dtype=torch.long))
    reads = Reads()
    run = trainer(tmp_path, reads, MemoryMonitor(snapshot_at_step=2), accelerator="gpu", devices=1)
    model = Classifier(torchvision_models().resnet18())
    run.fit(model, DataLoader(data, batch_size=4))
    assert not is_cuda_history_recorded()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    path = Path(run.log_dir) / "memtools" / "memory_snapshot_step2_rank0.pickle"
    snapshot = read_snapshot(path)
    labels = {entry["user_metadata"] for entry in snapshot["device_traces"][0]}
    assert {"forward | net.layer1.0.conv1", "backward | net.layer4.1.conv2"} <= labels
    view = timeline_from(path)
    json.dumps(view)
    assert [name for _, name in view["phases"]] == ["forward", "backward", "optimizer"]
    weights = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    at_start = {name: values[0] for name, values in view["parts"].items()}
    assert at_start["parameters"] == pytest.approx(weights, rel=0.01)
    assert at_start["gradients"] == pytest.approx(weights, rel=0.01)
    assert at_start["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    for phase, allocated in reads.allocated.items():
        event = dict(map(reversed, view["phases"]))[phase]
        nearest = min(range(len(view["columns"])), key=lambda at, event=event: abs(view["columns"][at] - event))
        assert view["total"][nearest] == pytest.approx(allocated, rel=0.05), phase
    assert any(name.startswith("net.layer1") for one in view["top"] for name in one["names"])


def test_a_snapshot_that_torch_dumps_is_read(tmp_path):
    path = tmp_path / "torchs.pickle"
    torch.cuda.memory._record_memory_history()
    try:
        kept = torch.empty(48 * 2**20, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    view = timeline_from(path)
    assert max(view["total"]) >= kept.nbytes
    assert any(one["bytes"] == kept.nbytes and Path(__file__).name in one["names"][0] for one in view["top"])
    assert main(["snapshot", str(path), "-o", str(tmp_path / "page.html")]) == 0
