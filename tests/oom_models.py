"""A model that takes much memory and little computation, and runs of it that fail at a chosen place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools.memory.sizes import parse_size
from tests.batch_size_models import Samples, Scale


class Repeat(nn.Module):
    """Its output is `times` times as large as its input, and autograd keeps it."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.times, 1).exp()


class Layers(L.LightningModule):
    """`n` layers that each keep one activation of a sample's size, and at one place one of three times that size."""

    def __init__(self, n: int = 8, wide: int | None = 4, width: int = 0, batch: int = 4, val_batch: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [Scale(8) for _ in range(n)]
        if wide is not None:
            layers.insert(wide, nn.Sequential(Repeat(3), Narrow()))
        self.net = nn.Sequential(*layers)
        self.heavy = nn.Linear(width, width) if width else None
        self.sizes = {"train": batch, "val": val_batch, "test": val_batch, "predict": val_batch}

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        if self.heavy is not None:
            loss = loss + self.heavy(batch.flatten()[: self.heavy.in_features]).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self.net(batch).mean((1, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def loader(self, stage: str) -> DataLoader[Any]:
        return DataLoader(Samples(2 * self.sizes[stage], 8, 16384), batch_size=self.sizes[stage])

    def train_dataloader(self) -> Any:
        return self.loader("train")

    def val_dataloader(self) -> Any:
        return self.loader("val")

    def test_dataloader(self) -> Any:
        return self.loader("test")

    def predict_dataloader(self) -> Any:
        return self.loader("predict")


class Narrow(nn.Module):
    """The first eight channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :8] * 1.0


def sizes_in(report: str, title: str) -> dict[str, int]:
    """A table of a report under a title: first column to the second, a size."""
    section = report.split(f"## {title}\n")[1].split("\n## ", maxsplit=1)[0]
    rows = re.findall(r"^\| `?(.+?)`? \| ([\d.]+ [KMG]?i?B) \|", section, re.MULTILINE)
    return {name: parse_size(size) for name, size in rows}


def place_of(error: BaseException) -> Path:
    """Where the error's note says that the report is."""
    return Path(error.__notes__[-1].splitlines()[-1].removeprefix("Report: "))
