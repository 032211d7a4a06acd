"""Trains a model of two thousand layers, which takes seconds to plan; started by test_gradient_checkpointing.py.

python long_planning_run.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_memtools import GradientCheckpointing
from tests.lightning_models import Regression, loader, trainer


class Tall(Regression):
    """Two thousand layers in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(1000) for part in (nn.Linear(16, 16), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(4, 16), *layers, nn.Linear(16, 1))


class SaysThatAStepRan(L.Callback):
    """Of a callback, which planning leaves out: the module's own hooks run in the traced step too."""

    def on_train_batch_end(self, *_) -> None:
        print("a step ran", flush=True)  # noqa: T201, as below


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("fit begins", flush=True)  # noqa: T201, read by the test
    trainer(Path(sys.argv[1]), GradientCheckpointing(), SaysThatAStepRan(), max_steps=1).fit(
        Tall(), loader(16, 8), loader(8)
    )
    print("fit is over", flush=True)  # noqa: T201, as above
