"""On PyTorch's CUDA code: peaks and composition of a real allocator, events, and the lines that wait for the device."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.cuda_memory, pytest.mark.filterwarnings("ignore")]


class Waiting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(256, 256)
        self.watched: list[bool] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        loss.item()
        self.watched.append("training_step" in vars(self))
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.watched.append("training_step" in vars(self))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_line_that_waits_is_named_and_memory_is_that_of_the_allocator(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTOOLS", "1")
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    model = Waiting()
    L.Trainer(accelerator="cuda", devices=1, max_epochs=1, **quiet).fit(
        model, DataLoader(torch.randn(20 * 64, 256), 64)
    )
    (path,) = tmp_path.glob("memtools/*/summary.json")
    summary = json.loads(path.read_text())
    line = Path(__file__).read_text().splitlines().index("        loss.item()") + 1
    assert [place.rpartition("/")[2] for place in summary["run"]["waits"]] == [f"{Path(__file__).name}:{line}"]
    assert any("waits for the GPU at" in each for each in summary["verdict"]["lines"])
    computes = not torch.cuda.get_device_name().endswith("(dry run)")  # such a device takes no time
    assert summary["time"]["clock"] == ("device" if computes else "host")
    memory = summary["memory"]
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"] < memory["capacity_bytes"]
    assert sum(memory["composition_bytes"].values()) == pytest.approx(memory["peak_allocated_bytes"], rel=0.01)
    assert sum(model.watched) == 1  # it waits for one step, and is gone when that begins
