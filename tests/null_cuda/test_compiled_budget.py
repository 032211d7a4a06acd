"""GradientCheckpointing on a compiled model: budgets are tried on real steps, by the peak of torch's allocator."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch._functorch import config
from torch.utils.data import DataLoader

from lightning_memtools import GradientCheckpointing

pytestmark = [
    pytest.mark.cuda_memory,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # of torch itself, as it is imported
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Blocks(L.LightningModule):
    """Residual blocks: less is kept with each lower budget but 0, which recomputes all at once."""

    def __init__(self):
        super().__init__()
        self.net = Residual()
        self.peaks = []

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def on_train_batch_start(self, *_):
        torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, *_):  # before the callback reads the peak, and resets it
        self.peaks.append(torch.cuda.max_memory_allocated())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, callback, n_batches):
    torch.compiler.reset()
    module = Blocks()
    # The graphs that inductor would compile, run operator by operator.
    module.net.compile(backend="aot_eager_decomp_partition")
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, limit_train_batches=n_batches, default_root_dir=folder,
        logger=CSVLogger(folder, name="", version="run"), log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.zeros(n_batches * 8192, 64), batch_size=8192))
    torch.compiler.reset()
    return module


def test_the_budget_whose_measured_peak_fits_is_set_for_the_rest_of_the_training(tmp_path, capsys):
    module = fit(tmp_path, GradientCheckpointing(memory_budget=0.75), 8)
    said = " ".join(capsys.readouterr().out.split())
    assert "torch.compile recomputes with activation_memory_budget=0.8: peak" in said
    text = (tmp_path / "run" / "memtools" / "checkpoint_plan.md").read_text()
    assert "| chosen" in text
    # Three steps of the first budget, two of the one that was chosen, and the rest of the training.
    assert max(module.peaks[4:]) < 0.8 * module.peaks[2]
    assert config.activation_memory_budget == 1.0
