"""Small Lightning modules and loaders for whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def trainer(root: Path | None, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A quiet Trainer on the CPU that logs every step under `root`."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | options))


def loader(n: int = 32, batch_size: int = 8, *, seed: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    """n samples of four standard normal features and their noisy sum as the target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size)


def half(scale: float = 2.0**10) -> MixedPrecision:
    """16-mixed on the CPU, which Lightning offers only by hand."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@torch.library.custom_op("memtools_test::opaque", mutates_args=())
def opaque(tensor: Tensor) -> Tensor:
    """An operator of somebody's own, which has no kernel for tensors without values."""
    return tensor.clone()


class Regression(L.LightningModule):
    """A small network with Dropout and BatchNorm; returns its losses and logs none."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.train_losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.trainer.sanity_checking:
            self.val_losses.append(float(loss))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Adversaries(Regression):
    """Two networks, two optimizers, manual optimization; logs g_loss and d_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)
        self.losses: dict[str, list[float]] = {"g_loss": [], "d_loss": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for name, net, optimizer in zip(("g_loss", "d_loss"), (self.net, self.other), self.optimizers(), strict=True):
            loss = nn.functional.mse_loss(net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(name, loss)
            self.losses[name].append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.net, self.other)]
