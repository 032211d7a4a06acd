"""How long an out-of-memory report takes: real failures on virtual devices, of training and of validation.

    python benchmarks/oom_report.py [CASE ...]

takes some three minutes and writes results/oom_report.json, where results of cases that are not named stay. The limit
of the checks is processor time: `load` says how many programs shared the machine's cores, which makes the same work
take more of it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from estimate_models import LanguageModel, classify, convnext, next_token, resnet
from machine import RESULTS, save, spread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import OOMReport, VirtualDevice

RUNS = 4
Tensors = tuple[torch.Tensor, ...]


class Task(L.LightningModule):
    """A network trained on zeros."""

    def __init__(self, network: nn.Module, loss: Callable[..., torch.Tensor], batches: dict[str, Tensors]) -> None:
        super().__init__()
        self.network, self.loss, self.batches = network, loss, batches

    def training_step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.loss(self.network, batch)

    def validation_step(self, batch: Sequence[torch.Tensor]) -> None:
        self.log("val_loss", self.loss(self.network, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.batches["train"]), batch_size=len(self.batches["train"][0]))

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.batches["val"]), batch_size=len(self.batches["val"][0]))


class TimedReport(OOMReport):
    """Keeps how long its work on an exception took."""

    seconds = cpu_seconds = 0.0
    text = ""

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        super().on_exception(*args, **kwargs)
        self.seconds, self.cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu


def tokens(n: int, length: int) -> Tensors:
    return (torch.zeros(n, length, dtype=torch.long),)


def pictures(n: int) -> Tensors:
    return torch.zeros(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)


# Network, loss, capacity, batches: the stage with the large one fails.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, str, dict[str, Tensors]]] = {
    "GPT-2 small, training": (LanguageModel, next_token, "4GiB", {"train": tokens(16, 512), "val": tokens(1, 64)}),
    "GPT-2 small, validation": (LanguageModel, next_token, "4GiB", {"train": tokens(1, 64), "val": tokens(64, 512)}),
    "ResNet-50, training": (
        partial(resnet, (3, 4, 6, 3), bottleneck=True),
        classify,
        "2GiB",
        {"train": pictures(64), "val": pictures(1)},
    ),
    "ConvNeXt-T, training": (convnext, classify, "2GiB", {"train": pictures(64), "val": pictures(1)}),
}


def report_on(name: str) -> TimedReport:
    """One failure and its report."""
    build, loss, capacity, batches = CASES[name]
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, VirtualDevice(capacity):
        report = TimedReport(directory=folder)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, default_root_dir=folder, num_sanity_val_steps=0,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[report],
        )  # fmt: skip
        try:
            trainer.fit(Task(build(), loss, batches))
        except torch.OutOfMemoryError:
            report.text = next(Path(folder).glob("oom-*.md")).read_text()
            return report
    raise RuntimeError(f"{name} does not run out of memory, so there is nothing to measure.")


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    path = RESULTS / "oom_report.json"
    measured = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in sys.argv[1:] or CASES:
        reports = [report_on(name) for _ in range(RUNS)]
        measured[name] = {
            "seconds": spread([report.seconds for report in reports]),
            "cpu_seconds": spread([report.cpu_seconds for report in reports]),
            # Lines of advice with numbers, and those that were not reached in time.
            "actions": [len(re.findall(r"^\d+\. ", report.text, re.MULTILINE)) for report in reports],
            "not_reached": [report.text.count("the time for the checks was over") for report in reports],
            "load": round(os.getloadavg()[0], 1),
        }
        save("oom_report", {"cases": {name: measured[name] for name in CASES if name in measured}})


if __name__ == "__main__":
    main()
