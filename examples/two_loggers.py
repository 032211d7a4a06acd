"""Two loggers at once: TensorBoard, and Weights & Biases without a connection (`wandb sync` uploads the folder later).

python examples/two_loggers.py [--logs logs/two-loggers]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lightning_memtools import VirtualDevice, default_callbacks


def main() -> None:
    """Train 8 batches, and show what both loggers have received."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs/two-loggers")
    logs = parser.parse_args().logs
    os.environ["WANDB_SILENT"] = "true"
    Path(logs).mkdir(parents=True, exist_ok=True)  # wandb writes to a temporary folder where this one does not exist
    wandb = WandbLogger(project="two-loggers", save_dir=logs, offline=True)
    with VirtualDevice("16MiB"):  # leave this line out where you have a GPU
        trainer = L.Trainer(
            max_epochs=1,
            limit_train_batches=8,
            limit_val_batches=2,
            log_every_n_steps=2,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=[wandb, TensorBoardLogger(logs)],
            callbacks=default_callbacks(),
        )
        trainer.fit(BoringModel())
    last = wandb.experiment.summary
    for tag in ("loss/train", "memory/train/peak_allocated_gib", "memory/capacity_gib"):
        print(f"wandb: {tag} = {last[tag]:.6g}")
    print(f"wandb's run: {wandb.experiment.dir}")
    print(f"TensorBoard's run: {trainer.loggers[1].log_dir}")


if __name__ == "__main__":
    main()
