"""Brute force: what a run without HaltOnNaN does, looked at tensor by tensor and bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from tests.lightning_models import trainer


def state_bits(model: L.LightningModule, optimizers: list[Optimizer]) -> dict[str, Any]:
    """A copy of weights, buffers and optimizer state, with a name for each tensor."""
    state: dict[str, Any] = {
        f"model.{name}": value.clone() for name, value in model.state_dict().items() if not is_lazy(value)
    }
    for index, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        for key, entries in saved["state"].items():
            for name, value in entries.items():
                state[f"optimizer{index}.{key}.{name}"] = copy.deepcopy(value)
        for position, group in enumerate(saved["param_groups"]):
            state[f"optimizer{index}.lr{position}"] = copy.deepcopy(group["lr"])
    return state


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same in every bit."""
    names = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if isinstance(a, Tensor):
            same = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        else:
            same = a == b
        if not same:
            names.append(name)
    return names


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Observer(L.Callback):
    """Finds the first step with a bad loss or gradient, and keeps the state from before that step."""

    def __init__(self) -> None:
        self.first_bad: int | None = None
        self.batch_idx: int | None = None
        self.before: dict[str, Any] = {}
        self._losses: list[Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        starts = not pl_module.automatic_optimization or batch_idx % trainer.accumulate_grad_batches == 0
        if self.first_bad is None and starts:
            self.before = state_bits(pl_module, trainer.optimizers)
            self.step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self._losses = []

    def on_before_backward(self, trainer, pl_module, loss):
        if self.first_bad is None:
            if not pl_module.automatic_optimization:  # a second step of the batch begins where the first one ended
                self.before = state_bits(pl_module, trainer.optimizers)
            self._losses.append(loss.detach())
            if not torch.isfinite(loss).all():
                self.batch_idx = trainer.fit_loop.epoch_loop.batch_idx

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.first_bad is not None:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if not all(torch.isfinite(value).all() for value in [*values, *self._losses]):
            self.first_bad = self.step
            if self.batch_idx is None:
                self.batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        self._losses = []


def error_at_halt(
    model: L.LightningModule, data: Any, root: Path, *callbacks: L.Callback, options: Any = None, **arguments: Any
) -> NonFiniteError:
    """Train on a loader or a list of batches until HaltOnNaN(**arguments) halts; its files go into `root`/out."""
    halt = HaltOnNaN(**({"directory": str(root / "out")} | arguments))
    run = trainer(root, *callbacks, halt, **({"logger": False} | (options or {})))
    with pytest.raises(NonFiniteError) as caught:
        run.fit(model, DataLoader(data, batch_size=None) if isinstance(data, list) else data)  # type: ignore[arg-type]
    return caught.value
