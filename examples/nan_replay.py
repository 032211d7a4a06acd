"""A loss becomes infinite: the cause is named, the step is run again from a file, and a changed model is tried on it.

python examples/nan_replay.py [--logs logs/nan]
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import HaltOnNaN, NonFiniteError, replay


class LogLikelihood(L.LightningModule):
    """Takes the logarithm of a sum that can be zero."""

    eps = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """The mean of minus the logarithm of an amount."""
        rows = batch[0]
        amount = rows.abs().sum(1) * torch.sigmoid(self.encoder(rows).squeeze(1))
        return -torch.log(amount.clamp(min=self.eps)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Mended(LogLikelihood):
    """The same with the input of the logarithm kept above zero."""

    eps = 1e-6


def main() -> None:
    """Halt, replay, mend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs/nan")
    logs = parser.parse_args().logs
    L.seed_everything(0)
    rows = torch.randn(240, 6)
    rows[99] = 0.0  # sample 3 of batch 12
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[HaltOnNaN(directory=logs)],
    )
    try:
        trainer.fit(LogLikelihood(), DataLoader(TensorDataset(rows), batch_size=8))
    except NonFiniteError as error:
        print(error)
        path = str(error.step_path)
        again = replay(path, model=LogLikelihood())
        print(f"\nRun again from the file: the same in every bit: {again.exact}; finite: {again.is_finite}")
        mended = replay(path, model=Mended())
        print(f"With the mended class: finite: {mended.is_finite}")


if __name__ == "__main__":
    main()
