"""Models that scripts of dry runs and their tests share."""

from __future__ import annotations

import torch
from lightning import LightningModule
from torch import nn


class Resumed(LightningModule):
    """Notes the epoch of each step, and how many there are to be."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(100, 100)
        self.seen: list[tuple[int, int | None]] = []

    def training_step(self, batch, _):
        self.seen.append((self.current_epoch, self.trainer.max_epochs))
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Evaluated(Resumed):
    """Logs a loss, and can be tested."""

    def training_step(self, batch, _):
        self.log("loss", loss := super().training_step(batch, _))
        return loss

    def test_step(self, batch, batch_idx):
        self.net(batch)
