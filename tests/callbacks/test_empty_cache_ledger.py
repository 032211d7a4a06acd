"""Whole runs: leaks are named with their true holder after three epochs, healthy runs never are."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.empty_cache import EmptyCache
from tests.lightning_models import Adversaries, Regression, loader, trainer

pytestmark = pytest.mark.usefixtures("quick_collections")


def warnings_of(root: Path, model: L.LightningModule, *callbacks: L.Callback, epochs: int = 3, validate: bool = True,
                **options: Any) -> list[str]:  # fmt: skip
    """Train on a virtual device; the ledger's warnings. All other warnings are errors."""
    device = VirtualDevice("1GiB")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with device:
            run = trainer(root, EmptyCache(), *callbacks, **({"max_epochs": epochs, "logger": False} | options))
            run.fit(model, loader(), loader(16, seed=1) if validate else None)
    texts = [str(warning.message) for warning in said]
    return [text for text in texts if "in a row" in text]


class Keeps(Regression):
    """Has a list to keep tensors in."""

    def __init__(self):
        super().__init__()
        self.kept = []


class KeepsValidationOutputs(Keeps):
    def validation_step(self, batch, batch_idx):
        self.kept.append({"pred": self.net(batch[0]), "loss": self.loss(batch)})


class Predictions(torchmetrics.Metric):
    preds: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("preds", default=[])

    def update(self, preds: Tensor) -> None:
        self.preds.append(preds)

    def compute(self) -> Tensor:
        return torch.cat(self.preds).mean()


class HasAMetricThatKeepsItsGraph(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Predictions()

    def training_step(self, batch, batch_idx):
        self.metric.update(self.net(batch[0]))
        return self.loss(batch)


class CatchesTensorsInAClosure(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_hook(recorder())


def recorder():
    seen = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    return hook


class Collector(L.Callback):
    """Keeps batches."""

    def __init__(self):
        self.by_step = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.by_step[trainer.global_step] = batch


class KeepsBatches(Adversaries):
    def on_train_batch_start(self, batch, batch_idx):
        self.batches = [*getattr(self, "batches", []), batch[0] * 2]


# Each with what its warning says, the holder first. Two batches in each of three epochs, and two of the sanity check;
# the closure sees training and validation, and what training made has graphs.
@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (
            KeepsValidationOutputs,
            (
                "KeepsValidationOutputs.kept (a list of 8; one is KeepsValidationOutputs.kept[ | tensors (8 of "
                "shape (8, 1) float32 | 8 of shape () float32 | 8.00 KiB, without autograd graphs | Clear Keeps"
            ),
        ),
        (
            HasAMetricThatKeepsItsGraph,
            (
                "HasAMetricThatKeepsItsGraph.metric.preds (a list of 12; | tensors (12 of shape (8, 1) float32), "
                "6.00 KiB | 12 of them with an autograd graph | Reset the metric | `.detach().cpu()`"
            ),
        ),
        (
            CatchesTensorsInAClosure,
            (
                "seen in the closure of recorder.<locals>.hook (test_empty_cache_ledger.py: | tensors (20 of shape "
                "(8, 1) float32 | 10.0 KiB | 12 of them with an autograd graph | handle.remove()"
            ),
        ),
        (lambda: (Regression(), Collector()), "Collector.by_step (a dict of 12; one is Collector.by_step["),
        (KeepsBatches, "KeepsBatches.batches (a list of 12;"),
    ],
)
def test_leaks_are_named(model, facts, tmp_path):
    made = model()
    (text,) = warnings_of(tmp_path, *(made if isinstance(made, tuple) else (made,)))
    assert "in 3 epochs in a row" in text
    assert [fact for fact in facts.split(" | ") if fact not in text] == []


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (KeepsBatches, {"validate": False}, ["KeepsBatches.batches"]),
        (KeepsValidationOutputs, {"epochs": 8}, ["in a row"]),  # once in a run
        (KeepsValidationOutputs, {"epochs": 1, "val_check_interval": 1}, ["in 3 evaluations in a row"]),
        (KeepsValidationOutputs, {"epochs": 2}, []),  # too few
        (KeepsValidationOutputs, {"epochs": 6, "check_val_every_n_epoch": 2}, ["in a row"]),  # each with the last one
    ],
)
def test_leaks_are_reported_once_after_three_epochs_or_evaluations(model, options, said, tmp_path):
    texts = warnings_of(tmp_path, model(), **options)
    assert [part for part, text in zip(said, texts, strict=True) if part not in text] == []


class KeepsTheLastHundred(Regression):
    def __init__(self):
        super().__init__()
        self.recent = deque(maxlen=100)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.recent.append(loss.detach() * 1)
        return loss


class LogsMetrics(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.everything = torchmetrics.CatMetric()

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.error(out, batch[1])
        self.everything.update(out)
        self.log("error", self.error)
        self.log("val_loss", nn.functional.mse_loss(out, batch[1]))

    def on_validation_epoch_end(self):
        self.everything.compute()
        self.everything.reset()


# tests/memory/leaks has more: values that are replaced, and others.
HEALTHY: dict[str, Any] = {
    "average_of_weights": (Regression, lambda: [EMAWeightAveraging()]),
    "bounded_history": (KeepsTheLastHundred, list),
    "metrics": (LogsMetrics, list),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_runs_are_never_accused(case, tmp_path):
    model, callbacks = HEALTHY[case]
    assert not warnings_of(tmp_path, model(), *callbacks(), epochs=10)
