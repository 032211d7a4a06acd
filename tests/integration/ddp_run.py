"""A whole run on two ranks, started by test_ddp.py; each rank leaves its losses behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor
from tests.lightning_models import Regression, loader, trainer


def main(root: Path) -> None:
    L.seed_everything(0, verbose=False)
    model = Regression()
    run = trainer(
        root,
        MemoryMonitor(per_rank=True),
        LossCurves(every_n_steps=2, grad_norm=True),
        logger=[TensorBoardLogger(root, name="", version="board"), CSVLogger(root, name="", version="table")],
        strategy="ddp",
        devices=2,
    )
    run.fit(model, loader(48, 8), loader(32, 8))
    run.test(model, loader(16, 8), verbose=False)
    losses = {"train": model.train_losses, "val": model.val_losses}
    (root / f"losses{run.global_rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
