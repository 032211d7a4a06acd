"""LightningCLI with YAML: every callback and logger comes from a file.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml [--trainer.max_epochs 2]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import VirtualDevice


class Regression(L.LightningModule):
    """Rows of 64 numbers to their sum, through `depth` blocks."""

    def __init__(self, depth: int = 4, width: int = 256, batch_size: int = 64) -> None:  # noqa: ARG002, saved below
        super().__init__()
        self.save_hyperparameters()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error."""
        rows = batch[0]
        return nn.functional.mse_loss(self.net(rows).squeeze(1), rows.sum(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """The loss."""
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002, as above
        """Log the loss."""
        self.log("val_loss", self.loss(batch))

    def train_dataloader(self) -> DataLoader[Any]:
        """Random rows."""
        return DataLoader(TensorDataset(torch.randn(4096, 64)), self.hparams["batch_size"], drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Random rows."""
        return DataLoader(TensorDataset(torch.randn(256, 64)), 256)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Run the command line; without arguments, fit with the file beside this one."""
    arguments = sys.argv[1:] or ["fit", "--config", str(Path(__file__).with_suffix(".yaml"))]
    with VirtualDevice("64MiB"):  # leave this line out where you have a GPU
        cli = LightningCLI(Regression, save_config_callback=None, args=arguments)
    for logger in cli.trainer.loggers:
        print(f"{type(logger).__name__}: {logger.log_dir}")


if __name__ == "__main__":
    main()
