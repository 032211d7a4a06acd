"""A run on two ranks with and without GradientCheckpointing, started by test_gradient_checkpointing.py."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from tests.checkpointing.models import encoder
from tests.lightning_models import Regression, loader, trainer


class Encoder(Regression):
    """An encoder in a Sequential, with a layer that takes no part when `unused`."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 64), nn.Unflatten(1, (2, 32)), *encoder(4, 0.1), nn.Flatten(), nn.Linear(64, 1)
        )
        if unused:
            self.idle = nn.Linear(3, 3)


def main(root: Path, find_unused: str) -> None:
    unused = find_unused == "on"
    for name in ("plain", "checkpointed"):
        L.seed_everything(0, verbose=False)
        model = Encoder(unused=unused)
        callback = GradientCheckpointing(bn_dropout="recompute")
        run = trainer(
            root,
            *([callback] if name == "checkpointed" else []),
            strategy="ddp_find_unused_parameters_true" if unused else "ddp",
            devices=2,
            logger=False,
        )
        run.fit(model, loader(96, 16))
        plan = None if callback.plan is None else callback.plan.chains
        torch.save({"weights": model.state_dict(), "plan": plan}, root / f"{find_unused}-{name}-{run.global_rank}.pt")
        run.strategy.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
