"""Run as a program, once per rank: one rank of two runs out of memory in the third batch, and nobody catches it.

LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python tests/integration/oom_on_ranks.py <folder> <culprit>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import OOMReport, VirtualDevice
from tests.lightning_models import Regression, loader, trainer

MIB = 2**20
CULPRITS_BATCH = 2


class Greedy(Regression):
    """Asks for 80 MiB in one batch on the rank it is told."""

    def __init__(self, culprit: int) -> None:
        super().__init__()
        self.culprit = culprit

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == CULPRITS_BATCH and self.global_rank == self.culprit:
            torch.empty(80 * MIB, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def main(folder: Path, culprit: int) -> None:
    torch.set_num_threads(1)
    run = trainer(
        folder,
        OOMReport(),
        logger=TensorBoardLogger(folder, name="", version="board"),
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
    )
    with VirtualDevice("64MiB"):
        run.fit(Greedy(culprit), loader(64, 8))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
