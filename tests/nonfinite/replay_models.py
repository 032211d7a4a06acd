"""Modules whose steps use all that a replay must put back. They stand here so that a fresh process finds them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.lightning_models import half
from tests.nonfinite.observe import error_at_halt

BAD = 7


class Everything(L.LightningModule):
    """Dropout, BatchNorm, random numbers of three kinds, and three buffers that the loss depends on.

    At batch 7 a head takes the log of 0; the gradients of the other weights stay finite, so that a wrong bit shows.
    """

    def __init__(self, width: int = 16, *, frozen: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))
        self.still = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))
        self.still.requires_grad_(not frozen)
        self.last = nn.Linear(width, 4)
        self.log_head = nn.Linear(6, 1)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4))
        self.positions: Tensor
        rows = torch.linspace(-0.1, 0.1, 4).expand(2, 4)  # they share memory, and no checkpoint can be loaded into them
        self.register_buffer("positions", rows, persistent=False)
        self.temperature: Tensor
        self.register_buffer("temperature", torch.ones(()))

    def on_train_epoch_start(self) -> None:
        self.still.eval()

    def finite(self, x: Tensor) -> Tensor:
        self.temperature = self.temperature * 0.99
        x = x + 0.1 * torch.randn_like(x) + 0.1 * random.random()  # noqa: S311, noise
        x = x * torch.from_numpy(np.random.uniform(0.9, 1.1, tuple(x.shape)).astype("float32")).to(x)  # noqa: NPY002, what users write
        hidden = self.net(x)
        out = self.last(hidden + self.still(hidden)).float()
        loss: Tensor = ((out - self.center - self.positions[1]) / self.temperature).square().mean()
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * out.mean(0)
        return loss

    def bad(self, x: Tensor) -> Tensor:
        amount = x.abs().sum(1) * torch.sigmoid(self.log_head(x)).squeeze(1).float()
        return -torch.log(amount).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.finite(batch) + self.bad(batch)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ReadsRate(Everything):
    """Its loss depends on the learning rate, which a scheduler moves, and on where training is."""

    def finite(self, x):
        optimizer: Any = self.optimizers()
        rate = optimizer.param_groups[0]["lr"]
        return super().finite(x) * (1 + 100 * rate) + 0.01 * self.global_step * self.last.bias.sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ManualEverything(Everything):
    """Two optimizers, stepped by the module; the second one's loss goes bad."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        for optimizer, loss_of in ((first, self.finite), (second, lambda x: self.finite(x) + self.bad(x))):
            optimizer.zero_grad()
            loss = loss_of(batch)
            self.manual_backward(loss)
            self.log("loss", loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        nets = [self.net.parameters(), [*self.last.parameters(), *self.log_head.parameters()]]
        return [torch.optim.AdamW(net, lr=1e-3) for net in nets]


class SingleManual(ManualEverything):
    """One optimizer, one step for every second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward((self.finite(batch) + self.bad(batch)) / 2)
        if batch_idx % 2:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TwiceManual(ManualEverything):
    """One optimizer, stepped twice in each batch; a scaler refuses to unscale its gradients twice."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for loss_of in (self.finite, lambda x: self.finite(x) + self.bad(x)):
            optimizer.zero_grad()
            self.manual_backward(loss_of(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# Name: module, and options of the Trainer.
RUNS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], dict[str, Any]]]] = {
    "plain": (Everything, dict),
    "accumulation": (Everything, lambda: {"accumulate_grad_batches": 4}),
    "bf16": (Everything, lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 4}),
    "scaler": (Everything, lambda: {"plugins": half(), "accumulate_grad_batches": 4}),
    "reads_rate": (ReadsRate, dict),
    "manual": (ManualEverything, dict),
    "manual_accumulation": (SingleManual, dict),
    "manual_scaler": (TwiceManual, lambda: {"plugins": half()}),
}


class Recorder(L.Callback):
    """Keeps the gradients of the last step as the optimizer gets them."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.gradients = {
            name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None and id(p) in moved
        }


def batches(n: int = 8) -> list[Tensor]:
    """Batch 7 has a sample of zeros."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(8, 6, generator=generator) for _ in range(n)]
    made[BAD][3] = 0.0
    return made


def halted(name: str, root: Path, **arguments: Any) -> tuple[NonFiniteError, Recorder, Any]:
    """Run one of RUNS until it halts: the error, what was recorded, and the module."""
    L.seed_everything(0, verbose=False)
    make, options = RUNS[name]
    model, recorder = make(), Recorder()
    arguments = {"directory": str(root / "memtools")} | arguments
    error = error_at_halt(model, batches(), root, recorder, options=options(), **arguments)
    return error, recorder, model
