"""Out of memory, a report, and a run that fits: gradient checkpointing and a tuned batch size.

A network of 8 blocks on a simulated GPU of 60 MiB. The first run fails and leaves a report; the second one adds the two
callbacks that the report's actions stand for.

    python examples/out_of_memory.py [--logs logs/out-of-memory]
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import BatchSizeTuner, GradientCheckpointing, VirtualDevice, default_callbacks


class Blocks(L.LightningModule):
    """Rows of 128 numbers through 8 blocks."""

    def __init__(self, batch_size: int = 1024) -> None:  # noqa: ARG002, saved as a hyperparameter
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8)]
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """Mean squares."""
        return self.blocks(batch[0]).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> DataLoader[Any]:
        """Random rows."""
        return DataLoader(TensorDataset(torch.randn(8192, 128)), self.hparams["batch_size"], drop_last=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def train(logs: str, *callbacks: L.Callback) -> Blocks:
    """Train one epoch of at most 4 batches on a GPU of 60 MiB."""
    model = Blocks()
    with VirtualDevice("60MiB"):  # leave this line out where you have a GPU
        L.Trainer(
            max_epochs=1,
            limit_train_batches=4,
            log_every_n_steps=1,
            accelerator="cpu",
            default_root_dir=logs,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[*default_callbacks(), *callbacks],
        ).fit(model)
    return model


def main() -> None:
    """Fail, read the report, and train."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs/out-of-memory")
    logs = parser.parse_args().logs
    L.seed_everything(0)
    try:
        train(logs)
    except torch.OutOfMemoryError:
        report = next(Path(logs).rglob("memtools/oom-*.md"))
        print(f"\nThe first run failed. Its report: {report}\n")
    model = train(logs, GradientCheckpointing(), BatchSizeTuner(max_trials=5))
    print(f"\nThe second run fits, with a batch of {model.hparams['batch_size']} instead of 1024.")


if __name__ == "__main__":
    main()
