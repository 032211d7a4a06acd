"""TrainingDoctor's cost: steps of ResNet-18 that it watches, and those after, beside the same steps without it.

The trainings with and without it alternate in one process, and what counts is the processor time of a whole step, from
the end of the step before to its own end. The first step is shown apart: it holds the trial on fake tensors, once.

    python benchmarks/doctor.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import save, spread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import TrainingDoctor

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.zoo import torchvision_models

ROUNDS, STEPS, WATCHED = 5, 18, 12
BATCH, PIXELS = 16, 64


class Classifier(L.LightningModule):
    """torchvision's ResNet-18, trained as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision_models().resnet18(num_classes=10)

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


class Clock(L.Callback):
    """Notes the processor time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.ends.append(time.process_time())

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())


def steps_ms(*callbacks: L.Callback) -> list[float]:
    """Train, and return the milliseconds of each step."""
    L.seed_everything(0, verbose=False)
    clock = Clock()
    x, y = torch.randn(BATCH * STEPS, 3, PIXELS, PIXELS), torch.randint(0, 10, (BATCH * STEPS,))
    with tempfile.TemporaryDirectory() as root:
        L.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=root, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False,
                  callbacks=[*callbacks, clock]).fit(Classifier(), DataLoader(TensorDataset(x, y), BATCH))  # fmt: skip
    return [1e3 * (after - before) for before, after in zip(clock.ends, clock.ends[1:], strict=False)]


def main() -> None:
    runs: dict[str, list[list[float]]] = {"without": [], "with": []}
    steps_ms()  # fills caches
    for _ in range(ROUNDS):
        runs["without"].append(steps_ms())
        runs["with"].append(steps_ms(TrainingDoctor(steps=WATCHED)))
    parts = {"first": slice(0, 1), "watched": slice(1, WATCHED), "later": slice(WATCHED, None)}
    figures: dict[str, Any] = {}
    for part, where in parts.items():
        times = {name: [step for run in made for step in run[where]] for name, made in runs.items()}
        figures[part] = {name: spread(samples) for name, samples in times.items()}
        figures[part]["ratio_of_medians"] = statistics.median(times["with"]) / statistics.median(times["without"])
    figures["watched"]["target"] = 1.1
    whole = {name: statistics.median(sum(run[:WATCHED]) for run in made) for name, made in runs.items()}
    save(
        "doctor",
        {
            "what": f"processor milliseconds of a training step of ResNet-18, {BATCH} pictures of {PIXELS} pixels; the "
            f"doctor watches the first {WATCHED} of {STEPS} steps",
            **figures,
            "all_watched_steps_with_the_first": {**whole, "ratio": whole["with"] / whole["without"]},
        },
    )


if __name__ == "__main__":
    main()
