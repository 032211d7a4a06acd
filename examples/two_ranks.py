"""DDP on two ranks, each with a simulated GPU, and two loggers: maxima over ranks, and the rank that holds them.

python examples/two_ranks.py [--logs logs/two-ranks]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice


class Net(L.LightningModule):
    """A perceptron. Rank 1 keeps a larger buffer, so that the ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))

    def on_fit_start(self) -> None:
        """Make the ranks differ."""
        self.kept = torch.zeros(2**20 * (1 + self.global_rank))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """Mean squares."""
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def main() -> None:
    """Train on two processes. Rank 0 alone writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs/two-ranks")
    logs = parser.parse_args().logs
    L.seed_everything(0)
    rows = TensorDataset(torch.randn(512, 128))
    with VirtualDevice("RTX 3060"):
        trainer = L.Trainer(
            max_epochs=2,
            log_every_n_steps=2,
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            logger=[TensorBoardLogger(logs), CSVLogger(logs)],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            callbacks=[MemoryMonitor(), LossCurves()],
        )
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
            rows, num_replicas=2, rank=trainer.global_rank
        )
        trainer.fit(Net(), DataLoader(rows, batch_size=32, sampler=sampler))
    if trainer.is_global_zero:
        (table,) = Path(trainer.loggers[1].log_dir or logs).glob("metrics.csv")
        rows_of = [row for row in csv.DictReader(table.open()) if row.get("memory/train/peak_rank")]
        last = rows_of[-1]
        for tag in ("peak_allocated_gib", "peak_allocated_gib_min", "peak_rank"):
            print(f"memory/train/{tag}: {last[f'memory/train/{tag}']}")


if __name__ == "__main__":
    main()
