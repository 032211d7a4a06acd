"""Whole Lightning runs inside a VirtualDevice."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import VirtualDevice
from tests.lightning_models import trainer
from tests.memory.virtual.reading import allocated


def blocks(*n_floats: int) -> int:
    """What storages of so many floats take: multiples of 512 bytes."""
    return sum(-(-n * 4 // 512) * 512 for n in n_floats)


class Wide(L.LightningModule):
    """One hidden layer of 1000, Adam."""

    SIZES = (4 * 1000, 1000, 1000, 1)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 1))
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.ones(4096, 4)
        return DataLoader(TensorDataset(x, x[:, :1].clone()), batch_size=self.batch_size)


class Look(L.Callback):
    """Notes what is on the device: at the start of training, and when each batch begins and ends."""

    def __init__(self) -> None:
        self.at_start: dict[str, int] = {}
        self.batches: list[tuple[dict[str, int], dict[str, int]]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = VirtualDevice.current()
        assert device is not None
        device.track(pl_module, *trainer.optimizers)
        self.at_start = dict(device.composition().by_category)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        device = VirtualDevice.current()
        assert device is not None
        self.begun = dict(device.composition().by_category)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = VirtualDevice.current()
        assert device is not None
        self.batches.append((self.begun, dict(device.composition().by_category)))


def test_a_fit_by_arithmetic(tmp_path: Path) -> None:
    look = Look()
    p, batch = blocks(*Wide.SIZES), blocks(64 * 4) + blocks(64)
    with VirtualDevice() as device:
        model = Wide()
        model.batch_size = 64
        fit = trainer(tmp_path, look, logger=False, max_steps=3, enable_checkpointing=False)
        fit.fit(model)
        expected = {"parameter": p, "gradient": 0, "optimizer": 0, "activation": 0, "input": 0, "buffer": 0}
        # The data set, made inside, is still counted until the loader first yields.
        assert {key: look.at_start[key] for key in expected} == expected
        moments = 2 * p + 4 * 512
        for step, (begun, ended) in enumerate(look.batches):
            assert begun["parameter"] == ended["parameter"] == p
            # The batch before dies when the next one has come.
            assert begun["input"] == ended["input"] == batch
            assert begun["gradient"] == (p if step else 0)
            assert begun["optimizer"] == (moments if step else 0)
            assert ended["gradient"] == p
            assert ended["optimizer"] == moments
            # The loss of this step, and what Lightning keeps of it.
            assert ended["activation"] <= 2 * 512
        peak = device.composition_at_peak()
        # In backward, when the last layer has its gradients and the first has not.
        assert (peak["parameters"], peak["gradients"]) == (p, blocks(*Wide.SIZES[2:]))
        assert peak["optimizer"] >= moments
        del fit, model, look
        gc.collect()
        assert allocated(device) == 0
