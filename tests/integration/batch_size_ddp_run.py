"""Tunes on several ranks, the last with a smaller virtual device; started by test_batch_size_ddp.py.

python batch_size_ddp_run.py FOLDER RANKS CASE ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.batch_size_tuner import BatchSizeTuner
from tests.batch_size_models import Samples
from tests.lightning_models import trainer

WIDTH = 65_536


class Model(L.LightningModule):
    """BatchNorm, whose buffers DDP broadcasts in the first forward."""

    def __init__(self, case: str, batch_size: int = 4) -> None:
        super().__init__()
        self.case, self.batch_size = case, batch_size
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.norm = nn.BatchNorm1d(1)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(len(batch))
        hidden = (batch * self.scale).tanh()
        loss: Tensor = self.norm(hidden.mean(1, keepdim=True)).square().mean() + hidden.square().mean()
        if self.case == "sync_dist":
            self.log("loss", loss, sync_dist=True)
        if self.case == "own collective":
            torch.distributed.all_reduce(loss.detach())
        if self.case == "error" and self.global_rank == 1:
            raise KeyError("from the step of rank 1")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch))
        (batch * self.scale).tanh()

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(400, WIDTH), self.batch_size, shuffle=True)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: Path, ranks: int, case: str) -> None:
    """One fit; in "plain" the first size fits on every device but the last rank's."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    L.seed_everything(0, verbose=False)
    effective = 48 * ranks if case == "effective" else None
    stage = "val" if case == "validate" else "train"
    epochs = (1,) if case == "at_epochs" else ()
    tuner = BatchSizeTuner(
        stages=(stage,),
        at_epochs=epochs,
        effective_batch_size=effective,
        init_val=40 if case == "plain" else 8,
        max_trials=5,
    )
    model = Model(case)
    found: dict[str, Any] = {}
    with VirtualDevice("48MiB" if rank == ranks - 1 else "128MiB"):
        run = trainer(
            root,
            tuner,
            logger=False,
            strategy="ddp",
            devices=ranks,
            max_epochs=1 + len(epochs),
            limit_val_batches=1.0 if case == "validate" else 0,
        )
        try:
            run.validate(model, verbose=False) if case == "validate" else run.fit(model)
        except Exception as error:  # noqa: BLE001, what was raised is the result
            found["error"] = f"{type(error).__name__}: {error}"
        if tuner.result is not None:
            found |= {
                "size": tuner.result.sizes[stage],
                "accumulate": run.accumulate_grad_batches,
                "effective": tuner.result.effective_batch_size,
                "trials": [[trial.size, trial.outcome] for trial in tuner.result.trials],
                "base": tuner.result.trials[0].readings[0].base_allocated,
                "limits": [reading.limit for reading in tuner.result.trials[0].readings],
                "seen": model.seen,
                "weights": float(model.scale.detach().double().sum()),
                "steps": run.global_step,
            }
    (root / f"{case}{rank}.json").write_text(json.dumps(found))
    if "error" in found:
        os._exit(0)  # the launcher would end the other ranks before they have written


if __name__ == "__main__":
    for name in sys.argv[3:]:
        main(Path(sys.argv[1]), int(sys.argv[2]), name)
