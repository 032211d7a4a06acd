"""A whole run on two ranks inside a VirtualDevice, started by test_ddp.py; each rank leaves its losses behind.

python ddp_run.py FOLDER STRATEGY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice
from lightning_memtools.memory.sizes import MIB
from tests.lightning_models import Regression, loader, trainer


class Uneven(Regression):
    """Rank 1 takes 40 MiB more in a training step, rank 0 30 MiB more in a test step."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty(40 * MIB if self.global_rank == 1 else MIB, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        torch.empty(30 * MIB if self.global_rank == 0 else MIB, dtype=torch.uint8)
        return super().test_step(batch, batch_idx)


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


class WriteLosses(L.Callback):
    """Leaves the rank's losses behind; a spawned rank has no other way out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Regression)
        losses = {"train": pl_module.train_losses, "val": pl_module.val_losses}
        (self.root / f"losses{trainer.global_rank}.json").write_text(json.dumps(losses))


def main(root: Path, strategy: str) -> None:
    L.seed_everything(0, verbose=False)
    model = Uneven()
    run = trainer(
        root,
        MemoryMonitor(per_rank=True, snapshot_at_step=2),
        WriteLosses(root),
        LossCurves(every_n_steps=2, grad_norm=True),
        logger=[TensorBoardLogger(root, name="", version="board"), CSVLogger(root, name="", version="table")],
        strategy=sharded() if strategy == "fsdp2" else strategy,
        devices=2,
    )
    with VirtualDevice("1GiB"):
        run.fit(model, loader(48, 8), loader(32, 8))
        if strategy != "ddp_spawn":  # spawned ranks are gone, and with them what they learned
            run.test(model, loader(16, 8), verbose=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
