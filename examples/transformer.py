"""A Hugging Face transformer, and what recomputing its blocks gains.

python examples/transformer.py [--logs logs/transformer]
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memtools import GradientCheckpointing, LossCurves, MemoryMonitor, VirtualDevice


class LanguageModel(L.LightningModule):
    """A small GPT-2 with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=1000, use_cache=False))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """The loss of the next token."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


class Peak(L.Callback):
    """Notes the highest peak of a step. It stands before MemoryMonitor, which resets the device's counter."""

    mib = 0.0

    def on_train_batch_end(self, *_: Any, **_options: Any) -> None:
        """Read the counter."""
        device = VirtualDevice.current()
        assert device is not None
        self.mib = max(self.mib, (device.stats().peak_allocated or 0) / 2**20)


def peak_mib(logs: str, *callbacks: L.Callback) -> float:
    """Train four steps, and return the peak of allocated memory."""
    L.seed_everything(0, verbose=False)
    tokens = torch.randint(1000, (32, 128))
    peak = Peak()
    with VirtualDevice("RTX 4090"):
        L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=logs,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=1,
            callbacks=[peak, MemoryMonitor(), LossCurves(), *callbacks],
        ).fit(LanguageModel(), DataLoader(TensorDataset(tokens), batch_size=8))
    return peak.mib


def main() -> None:
    """Train plainly, then with what GradientCheckpointing finds by itself: blocks in a ModuleList and parts of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs/transformer")
    logs = parser.parse_args().logs
    plain = peak_mib(logs)
    planned = peak_mib(logs, GradientCheckpointing())
    print(f"\nPeak allocated: {plain:.0f} MiB; with the blocks recomputed {planned:.0f} MiB")


if __name__ == "__main__":
    main()
