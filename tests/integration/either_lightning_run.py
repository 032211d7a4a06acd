"""Trains with every callback under one of Lightning's two packages, in a process of its own.

python either_lightning_run.py PACKAGE FIRST FOLDER

PACKAGE is "lightning.pytorch" or "pytorch_lightning"; FIRST is the one that is imported first. Where they differ, the
callbacks are given to Trainers of PACKAGE, to see the errors. Writes seen.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_, PACKAGE, FIRST, FOLDER = sys.argv
importlib.import_module(FIRST)
pl: Any = importlib.import_module(PACKAGE)

from lightning_memtools import (  # noqa: E402, after the package that the run is about
    BatchSizeTuner,
    GradientCheckpointing,
    LossSpikes,
    OOMRecovery,
    OOMReport,
    VirtualDevice,
    default_callbacks,
    estimate_memory,
    tune_batch_size,
)
from tests.batch_size_models import Samples  # noqa: E402, as above

WIDTH = 256


class Model(pl.LightningModule):  # type: ignore[misc]
    """Layers that are worth recomputing, and a loader whose size can be tuned."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.batch_size = 4
        self.net = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    test_step = validation_step

    def train_dataloader(self) -> Any:
        combined = importlib.import_module(f"{PACKAGE}.utilities").CombinedLoader
        return combined({"only": DataLoader(Samples(256, WIDTH), self.batch_size)}, "max_size")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["only"] if isinstance(batch, dict) else batch

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(64, WIDTH), self.batch_size)

    test_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(name: str, *callbacks: Any, **options: Any) -> Any:
    quiet: dict[str, Any] = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    loggers = importlib.import_module(f"{PACKAGE}.loggers")
    logger = loggers.CSVLogger(FOLDER, name=name, version="logs")
    return pl.Trainer(
        callbacks=list(callbacks), logger=logger, log_every_n_steps=1, accelerator="cpu", **quiet | options
    )


def default_run() -> dict[str, Any]:
    with VirtualDevice("64MiB"):
        run = trainer("defaults", *default_callbacks(), max_steps=3)
        model = Model()
        run.fit(model)
        run.test(model, verbose=False)
    made = Path(FOLDER, "defaults", "logs", "memtools")
    header = Path(FOLDER, "defaults", "logs", "metrics.csv").read_text().splitlines()[0]
    return {"files": sorted(one.name for one in made.iterdir()), "columns": sorted(header.split(","))}


def tuned() -> dict[str, Any]:
    saved = importlib.import_module(f"{PACKAGE}.callbacks").ModelCheckpoint(FOLDER, "saved", every_n_train_steps=1)
    with VirtualDevice("64MiB"):
        model, function_model = Model(), Model()
        tuner = BatchSizeTuner(max_trials=4, max_val=64)
        run = trainer("tuner", saved, tuner, max_steps=2)
        run.fit(model)
        found = tune_batch_size(trainer("function", max_steps=2), function_model, max_trials=4, max_val=64)
    steps = sorted(one.name for one in Path(FOLDER).glob("saved*"))
    assert tuner.result is not None
    return {"size": model.batch_size, "steps": run.global_step, "checkpoints": steps, "function": found.sizes["train"]}


def checkpointed() -> dict[str, Any]:
    with VirtualDevice("256MiB"):
        callback = GradientCheckpointing()
        model = Model(24)
        model.batch_size = 128
        trainer("plan", callback, max_steps=2).fit(model)
    assert callback.plan is not None
    return {"plan": str(callback.plan)}


def out_of_memory() -> dict[str, Any]:
    with VirtualDevice("14MiB"):
        model = Model(24)
        model.batch_size = 128
        try:
            trainer("oom", OOMReport(), max_steps=2).fit(model)
        except torch.OutOfMemoryError:
            (page,) = Path(FOLDER, "oom", "logs", "memtools").glob("*.md")
            return {"page": page.read_text()}
    return {}


def from_yaml() -> dict[str, Any]:
    cli = importlib.import_module(f"{PACKAGE}.cli").LightningCLI(
        Model,
        run=False,
        save_config_callback=None,
        args={"trainer": {"logger": False, "callbacks": [{"class_path": "lightning_memtools.MemoryMonitor"}]}},
    )
    names = [type(one).__name__ for one in cli.trainer.callbacks if type(one).__module__.startswith("lightning_mem")]
    return {"callbacks": names}


def errors() -> dict[str, str]:
    """Return the error that each callback, and an estimate, gives for a Trainer or module of the other package."""

    def error_of(use: Any) -> str:
        try:
            use()
        except RuntimeError as error:
            return str(error)
        return ""

    others = [GradientCheckpointing(), BatchSizeTuner(), LossSpikes(), OOMRecovery(loss="mean")]
    fits = {
        type(callback).__name__: error_of(lambda: trainer("mixed", callback, max_steps=1).fit(Model()))  # noqa: B023, called at once
        for callback in (*default_callbacks(), *others)
    }
    return fits | {"estimate_memory": error_of(lambda: estimate_memory(Model(), torch.ones(4, WIDTH)))}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = (default_run, tuned, checkpointed, out_of_memory, from_yaml) if FIRST == PACKAGE else (errors,)
    seen: dict[str, Any] = {run.__name__: run() for run in runs}
    other = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}[PACKAGE]
    seen["imported_the_other"] = f"{other}.trainer" in sys.modules
    Path(FOLDER, "seen.json").write_text(json.dumps(seen))
