"""Runs that run out of memory, and what recovers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_memtools import OOMRecovery, VirtualDevice
from lightning_memtools._lightning import StepClosure
from lightning_memtools.recovery.step_recovery import StepRecovery
from tests.lightning_models import trainer

WIDTH = 64


class Sequences(L.LightningModule):
    """Rows of batches of different lengths: the third is the longest."""

    reduction = "mean"

    def __init__(self, dropout: float = 0.0, optimizer: str = "SGD") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )
        self.optimizer = optimizer
        self.seen: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1], reduction=self.reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch[0]))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if self.optimizer == "SGD"
            else torch.optim.AdamW(self.parameters(), lr=0.01)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


def batches(sizes: tuple[int, ...] = (64, 64, 512, 64, 512, 64), n_rows: int = 16) -> Any:
    """Batches of 16 samples of so many steps each."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in sizes:
        x = torch.randn(n_rows, size, 8, generator=generator)
        made.append([x, x.sum(-1, keepdim=True)])
    return made


def fit(
    root: Path,
    model: L.LightningModule,
    *callbacks: L.Callback,
    data: Any = None,
    capacity: str | None = None,
    **options: Any,
) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    run = trainer(root, *callbacks, **({"logger": False} | options))
    with VirtualDevice(capacity or "10GiB"):
        run.fit(model, DataLoader(batches() if data is None else data, batch_size=None))
    return run


# The short batches fit, and the long ones do not.
TIGHT = "6MiB"


def close(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=name)


class FailsOnce(TorchDispatchMode):
    """Memory runs out at one operator of one batch, counted from its forward pass on among those of a name."""

    def __init__(self, model: Any, at: int, batch: int = 0, name: str = "") -> None:
        super().__init__()
        self.model, self.at, self.batch, self.name, self.n = model, at, batch, name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.model.now == self.batch and self.n <= self.at and self.name in str(func):
            self.n += 1
            if self.n > self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return func(*args, **(kwargs or {}))


class Timed(Sequences):
    """Tells when the forward and backward pass of a batch run."""

    now: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.now = batch_idx
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.now = None


class Watched(Timed):
    """Has a metric, and keeps the gradients that it steps with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.metric = MeanMetric()
        self.gradients: list[list[Tensor]] = []
        self.streams: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.streams.append(torch.get_rng_state())
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach(), len(batch[0]))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.streams.append(torch.get_rng_state())
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def prepared(**options: Any) -> Any:
    torch.manual_seed(3)
    return Watched(**options)


def one_step(root: Path, model: Any, *callbacks: L.Callback, at: int | None, data: Any = None) -> Any:
    run: Any = trainer(root, *callbacks, logger=False)
    with FailsOnce(model, 10**9 if at is None else at) as run.failing:
        run.fit(model, DataLoader(batches((8,)) if data is None else data, batch_size=None))
    return run


def recovery(**options: Any) -> OOMRecovery:
    return OOMRecovery(**({"loss": "mean"} | options))


@dataclass
class StepResult:
    """Stands for what Lightning makes of a step's output."""

    closure_loss: Tensor | None
    extra: dict[str, Any] = field(default_factory=dict)


class NoResults(dict[str, Any]):
    """Stands for Lightning's collection of logged values: nothing is logged."""

    batch = batch_size = None


def closure(batch: Any, forward: Any) -> Any:
    return StepClosure(batch, forward, NoResults(), lambda loss: loss.backward(), lambda: None)


class Steps:
    """Steps without a Trainer, of which batches of more than `fits` do not fit; `size` says how large one is."""

    def __init__(self, model: nn.Module, size: Any, fits: int, **options: Any) -> None:
        self.model, self.size, self.fits = model, size, fits
        self.told: list[str] = []
        defaults: dict[str, Any] = {"max_splits": 8, "loss": "mean", "allow_batch_norm": False}
        self.recovery = StepRecovery(model, torch.device("cpu"), tell=self.told.append, **(defaults | options))

    def forward(self, batch: Any) -> StepResult:
        loss = self.model(batch)
        if self.size(batch) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return StepResult(loss)

    def run(self, batch: Any) -> None:
        """Run one, and leave the gradients."""
        self.model.zero_grad()
        self.recovery.run(closure(batch, self.forward))

    def step(self, batch: Any) -> float:
        """Run it, and return the largest error of a gradient, relative to the largest of the parameter's."""
        self.run(batch)
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        right = torch.autograd.grad(self.model(batch), list(self.model.parameters()))
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))
