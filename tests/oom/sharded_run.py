"""Two ranks under FSDP 2 that run out of memory, and their peaks with and without the advice, for test_sharded.py.

python sharded_run.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_memtools import GradientCheckpointing, OOMReport, VirtualDevice
from tests.lightning_models import trainer


class Blocks(L.LightningModule):
    """Six blocks, each a unit of FSDP 2."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))
        )

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for block in (*self.net, self.net):
            fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def run(root: Path, capacity: str, *callbacks: L.Callback, batch_size: int = 2048) -> VirtualDevice:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    data: Any = torch.utils.data.DataLoader(torch.randn(4 * batch_size, 256).unbind(), batch_size=batch_size)  # type: ignore[arg-type]
    with VirtualDevice(capacity, cuda_like=True) as device:
        trainer(root, *callbacks, strategy=strategy, devices=2, logger=False, max_epochs=1).fit(Blocks(), data)
    return device


def main(root: Path) -> None:
    peaks = {
        "plain": run(root, "1GiB").stats().peak_allocated,
        "recomputed": run(root, "1GiB", GradientCheckpointing()).stats().peak_allocated,
        "half": run(root, "1GiB", batch_size=1024).stats().peak_allocated,
    }
    rank = torch.distributed.get_rank()
    try:
        run(root, "96MiB", OOMReport(directory=str(root / str(rank))))
    except torch.OutOfMemoryError:
        (root / f"{rank}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
