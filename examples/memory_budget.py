"""A budget for memory in a test: recorded, kept, and broken by a change of one line. Needs no GPU.

    python examples/memory_budget.py

The tests of this file also run by themselves: pytest examples/memory_budget.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_memtools import assert_peak_memory


class Classifier(L.LightningModule):
    """A perceptron; a colleague's debugging is switched on by an environment variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        for layer in self.layers:
            x = layer(x).relu()
            if "KEEP" in os.environ:
                self.seen.append(x.detach().clone())
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """Return the loss."""
        loss: Tensor = self(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def test_a_large_batch_fits_into_its_budget() -> None:
    """Nothing is computed here: the step is estimated."""
    assert_peak_memory(Classifier(), torch.zeros(65536, 1024), at_most="6GiB", precision="bf16-mixed", gpu="RTX 4090")


@pytest.mark.peak_memory
def test_training_takes_no_more_than_recorded() -> None:
    """Without a GPU everything is computed on the CPU, and counted as a GPU would take it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in torch.ones(3, 256, 1024, device=device):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Record the peaks, then run the tests after a change of one line."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(__file__)
        options = [
            "-q", "--disable-warnings", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(here.parent),
            "-o", f"memory_budgets={folder}/memory-budgets.json", str(here),
        ]  # fmt: skip
        print("Recorded once, and committed with the code:", flush=True)
        pytest.main([*options, "--memory-record"])
        print("\nAfter a change that keeps what each layer made:", flush=True)
        os.environ["KEEP"] = "1"
        pytest.main(options)


if __name__ == "__main__":
    main()
