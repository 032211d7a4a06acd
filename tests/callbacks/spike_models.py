"""A small regression whose loss spikes in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

AT = 110  # the batch that goes wrong
N_BATCHES = 120

Batch = tuple[Tensor, Tensor]


def batches(n: int = N_BATCHES) -> list[Batch]:
    """Return batches of one linear problem with noise, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(8, 1, generator=generator)
    made = []
    for _ in range(n):
        x = torch.randn(16, 8, generator=generator)
        made.append((x, x @ weights + 0.1 * torch.randn(16, 1, generator=generator)))
    return made


def with_bad(change: Callable[[Batch], Batch], at: Sequence[int] = (AT,)) -> list[Batch]:
    """Return the batches, those at the given places changed."""
    return [change(batch) if index in at else batch for index, batch in enumerate(batches())]


def as_loader(made: list[Any]) -> DataLoader[Any]:
    """Return a loader of ready batches, in their order."""
    dataset: Any = made
    return DataLoader(dataset, batch_size=None)


class Spiking(L.LightningModule):
    """A network with BatchNorm and Dropout, trained by Adam; `kind` says what goes wrong at batch AT."""

    def __init__(self, kind: str = "", *, optimizer: str = "adam", lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind, self.optimizer, self.lr = kind, optimizer, lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.net(x) - y).square().mean()
        if self.kind == "gradient" and batch_idx == AT:
            weight: Any = self.net[4].weight
            loss = loss + 1e4 * (weight - weight.detach()).sum()  # adds 0, and its gradient
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.kind == "learning rate" and batch_idx == AT - 1:
            optimizer.param_groups[0]["lr"] = 30.0
        if self.kind == "learning rate" and batch_idx == AT:
            optimizer.param_groups[0]["lr"] = self.lr

    def configure_optimizers(self) -> Any:
        made: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "adam": lambda: torch.optim.Adam(self.parameters(), self.lr),
            "fused": lambda: torch.optim.Adam(self.parameters(), self.lr, fused=True),
        }
        optimizer = made[self.optimizer]()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SpikingGan(Spiking):
    """Two optimizers in manual optimization; the second one's loss is negative, and spikes."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        error = (self.net(x) - y).square().mean()
        for position, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(error.detach() + (self.net(x) - y).square().mean() - (5 if position else 0))
            optimizer.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[part].parameters(), 0.01) for part in (0, 4)]


@dataclass(frozen=True)
class SpikeCase:
    """A run with a spike: its module, its batches, arguments of its Trainer, and its steps."""

    model: Callable[[], L.LightningModule]
    batches: Callable[[], list[Batch]]
    steps: tuple[int, ...] = (AT,)
    trainer: Callable[[], dict[str, Any]] = dict


def labels_times(factor: float) -> Callable[[Batch], Batch]:
    """Return a change of a batch: its targets are multiplied."""
    return lambda batch: (batch[0], batch[1] * factor)
