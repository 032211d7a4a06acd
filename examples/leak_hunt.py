"""Something keeps tensors alive from epoch to epoch: EmptyCache names the tensors and their holder.

python examples/leak_hunt.py
"""

from __future__ import annotations

import logging

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import EmptyCache, VirtualDevice


class Leaky(L.LightningModule):
    """Keeps the outputs of validation, and never clears them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """Mean squares."""
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # noqa: ARG002, as above
        """Keep the outputs."""
        self.outputs.append(self.layer(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train for five epochs. The warning comes after the third evaluation that left more than the one before."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=128)
    with VirtualDevice("1GiB"):
        L.Trainer(
            max_epochs=5,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            callbacks=[EmptyCache()],
        ).fit(Leaky(), loader, loader)


if __name__ == "__main__":
    main()
