"""Trains with every pair of callbacks, on both of two ranks in one process each; started by test_pairs.py.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python pairs_run.py FOLDER
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import lightning_memtools
from lightning_memtools import VirtualDevice
from lightning_memtools.reporting.strategies import why_unsupported
from tests.batch_size_models import Samples
from tests.lightning_models import trainer

WIDTH = 256

# In both orders: it runs the others in its trials.
_TUNER = "BatchSizeTuner"


def callbacks() -> dict[str, type[L.Callback]]:
    """Every callback but those that refuse DDP, which test_strategies.py holds them to."""
    found = {name: getattr(lightning_memtools, name) for name in lightning_memtools.__all__}
    return {
        name: c
        for name, c in found.items()
        if inspect.isclass(c) and issubclass(c, L.Callback) and why_unsupported(name, DDPStrategy) is None
    }


def pairs() -> list[tuple[str, str]]:
    names = list(callbacks())
    return [*itertools.combinations(names, 2), *((name, _TUNER) for name in names if name != _TUNER)]


class Model(L.LightningModule):
    """Four layers that are worth recomputing, and a loader whose size can be tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    validation_step = training_step

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(128, WIDTH), self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(root: Path, pair: tuple[str, str]) -> dict[str, Any]:
    made = [callbacks()[name](**({"max_trials": 2, "max_val": 16} if name == _TUNER else {})) for name in pair]
    L.seed_everything(0, verbose=False)
    model = Model()
    seen: dict[str, Any] = {"error": ""}
    with VirtualDevice("64MiB"):
        fit = trainer(root / "-".join(pair), *made, strategy="ddp", devices=2, max_steps=3)
        try:
            fit.fit(model)
        except Exception:  # noqa: BLE001, what was raised is the result
            seen["error"] = traceback.format_exc()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return seen | {
        "steps": fit.global_step,
        "weights": hashlib.sha256(weights).hexdigest(),
        "size": model.batch_size,
        "recomputes": any(getattr(one, "plan", None) is not None for one in made),
    }


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seen = {}
    for pair in pairs():
        seen["+".join(pair)] = run(root, pair)
        (root / f"rank{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(seen))
        if seen["+".join(pair)]["error"]:
            break  # the other rank may wait in a collective


if __name__ == "__main__":
    main(Path(sys.argv[1]))
