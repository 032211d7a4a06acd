"""Scripts for dry runs, and the command that runs them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

MIB = 2**20

TRAINER = """
    import sys
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torch import nn
    from torch.utils.data import DataLoader

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))
        def training_step(self, batch, _):
            loss = self.net(batch).sum()
            self.log("train_loss", loss)
            return loss
        def validation_step(self, batch, _):
            self.log("val_loss", self.net(batch).sum())
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    loader = DataLoader(torch.randn(batch_size * 4, 1024), batch_size=batch_size)
    best = ModelCheckpoint(dirpath="my_checkpoints", monitor="val_loss")
    trainer = L.Trainer(max_epochs=1000, callbacks=[best], logger=CSVLogger("my_logs"), log_every_n_steps=1)
    trainer.fit(Model(), loader, loader)
    trainer.validate(ckpt_path="best", dataloaders=loader)
    print("steps", trainer.global_step, file=sys.stderr)
"""


def write_script(folder: Path, code: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(code))
    return path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_memtools.cli.main", "dry-run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
