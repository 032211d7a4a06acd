"""Fits with BatchSizeTuner on simulated devices, and the state after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from tests.batch_size_models import Samples
from tests.lightning_models import trainer

WIDTH = 65_536  # a sample is 256 KiB


N = 200


class Data(Samples):
    def __init__(self, n=N):
        super().__init__(n, WIDTH)


class Small(L.LightningModule):
    """Has about 1.5 MiB of activations per sample, little work, and every kind of state that a trial could change."""

    def __init__(self, batch_size: int = 4, n: int = N) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout(0.2)
        self.seen: list[int] = []
        self.val_factor = 1

    def loss(self, x):
        hidden = (x * self.scale).tanh()
        return self.norm(self.dropout(hidden.mean(1, keepdim=True))).square().mean() + hidden.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch))
        loss = self.loss(batch + 0.1 * torch.rand(len(batch), 1, device=batch.device))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hold = [batch.tanh() for _ in range(self.val_factor)]
        self.log("val_loss", sum((x.mean() for x in hold), torch.zeros(())), batch_size=len(batch))

    def train_dataloader(self) -> Any:
        return DataLoader(Data(self.hparams["n"]), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Data(self.hparams["n"]), batch_size=self.hparams["batch_size"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Constant(Small):
    """Without a schedule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.125)


def Tuner(**arguments: Any) -> BatchSizeTuner:  # noqa: N802, stands for the class
    """Returns a tuner with fewer trials: its accuracy is measured by the benchmark."""
    return BatchSizeTuner(**({"max_trials": 3} | arguments))


def fit(root: Path, tuner: BatchSizeTuner | None, model: L.LightningModule | None = None, *callbacks: L.Callback,
        capacity: str = "128MiB", loaders: Any = None, val_loaders: Any = None, datamodule: Any = None,
        **options: Any) -> tuple[L.LightningModule, L.Trainer]:  # fmt: skip
    with VirtualDevice(capacity):
        L.seed_everything(0, verbose=False)
        model = model or Small()
        validates = tuner is None or "val" in tuner.stages
        defaults = {"logger": False, "limit_val_batches": 2 * validates, "num_sanity_val_steps": 1}
        run = trainer(root, *([tuner] if tuner else []), *callbacks, **(defaults | options))
        run.fit(model, loaders, val_loaders, datamodule=datamodule)
    return model, run


def everything_of(model, run):
    return {
        **{f"weight {name}": value for name, value in model.state_dict().items()},
        **{f"moment {i} {name}": value for i, state in run.optimizers[0].state_dict()["state"].items()
           for name, value in state.items()},
        "numbers": torch.get_rng_state(),
        "rates": torch.tensor([group["lr"] for group in run.optimizers[0].param_groups]),
        "scheduler": torch.tensor([config.scheduler.total_steps for config in run.lr_scheduler_configs]),
    }  # fmt: skip
