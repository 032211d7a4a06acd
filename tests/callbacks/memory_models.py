"""Models that take a known amount of memory."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memtools.memory.sizes import MIB
from tests.lightning_models import Regression


class Wide(Regression):
    """Takes memory that arithmetic can tell: 1 MiB of weights without a bias, and a temporary of any size in a step."""

    def __init__(self, temporary_mib: dict[str, list[int]] | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(4, 65536, bias=False)
        self.temporary_mib = temporary_mib or {}
        self.n_steps = {"train": 0, "val": 0, "test": 0, "predict": 0}

    def take(self, stage):
        sizes = self.temporary_mib.get(stage, [])
        index = self.n_steps[stage]
        self.n_steps[stage] += 1
        if index < len(sizes):
            torch.empty(sizes[index] * MIB, dtype=torch.uint8)

    def training_step(self, batch, batch_idx):
        self.take("train")
        return self.net(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.take("val")
        return self.net(batch[0]).mean()

    def test_step(self, batch, batch_idx):
        self.take("test")

    def predict_step(self, batch, batch_idx):
        self.take("predict")
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0, foreach=False)


def gib(mib: float) -> float:
    return mib / 1024
