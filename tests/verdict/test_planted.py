"""Runs with a planted bottleneck, and healthy ones, under MEMTOOLS=1: the verdict is right in each."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memtools import VirtualDevice

WIDTH, STEPS = 1024, 24


class Model(L.LightningModule):
    """Layers whose steps take long enough that the loop around them does not count."""

    def __init__(self, net: nn.Module | None = None, **options) -> None:
        super().__init__()
        self.net = net or nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.options = SimpleNamespace(**options)
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        if hasattr(self.options, "leaks"):
            self.kept.append(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.net(batch[0]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        yield from torch.randn(STEPS * 64, 1, WIDTH)


class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


def loader(kind=TensorDataset, batches=STEPS, **options):
    return DataLoader(kind(torch.randn(64 * batches, WIDTH)), 64, **options)


class Idle(L.Callback):
    def on_train_batch_end(self, *args):
        time.sleep(0.2)


def device():
    return VirtualDevice("1GiB")


RUNS = {
    "slow loader": (Model, lambda: loader(Slow, 12), {}, "input-bound"),
    "heavy validation": (
        Model, loader, {"val": lambda: loader(batches=20), "val_check_interval": 4}, "validation-bound",
    ),
    "slow callback": (Model, lambda: loader(batches=12), {"callbacks": [Idle()]}, "overhead-bound"),
    "leak": (lambda: Model(leaks=True), loader, {"device": device}, "leak"),
    "linear": (Model, loader, {}, "healthy"),
    "on a device": (Model, loader, {"device": device}, "healthy"),
    "transformer": (lambda: Model(nn.TransformerEncoderLayer(WIDTH, 4)), lambda: loader(batches=15), {}, "healthy"),
    "manual": (Manual, loader, {}, "healthy"),
    "accumulating": (Model, loader, {"accumulate_grad_batches": 2}, "healthy"),
    "bf16": (Model, lambda: loader(batches=15), {"precision": "bf16-mixed"}, "healthy"),
    "stream": (Model, lambda: DataLoader(Stream(), 64), {"max_steps": STEPS, "max_epochs": -1}, "healthy"),
    "validating": (Model, loader, {"val": lambda: loader(batches=4), "max_epochs": 2}, "healthy"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_is_right(name, installed, monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTOOLS", "1")
    make, loads, options, expected = RUNS[name]
    options = {"max_epochs": 1, "val": lambda: None, "device": nullcontext} | options
    on_device, val = options.pop("device"), options.pop("val")
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    with on_device():
        L.Trainer(accelerator="cpu", **quiet | options).fit(make(), loads(), val())
    (path,) = tmp_path.glob("memtools/*/summary.json")
    verdict = json.loads(path.read_text())["verdict"]
    if expected == "leak":
        assert any(line.startswith("Problem: ") and "leak" in line for line in verdict["lines"]), verdict
    else:
        assert expected in {verdict["limit"], "healthy" if verdict["healthy"] else ""}, verdict
