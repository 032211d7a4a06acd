"""A fit by a real Trainer, on real tensors in a VirtualDevice: what an estimate is held against."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset

from lightning_memtools import VirtualDevice
from tests.lightning_models import trainer

HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def copy_of(batch):
    if isinstance(batch, tuple):
        return tuple(map(copy_of, batch))
    return batch.clone()


class Batches(Dataset[Any]):
    """Copies of one batch."""

    def __init__(self, batch, length):
        self.batch, self.length = batch, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return copy_of(self.batch)


class Stepped(L.LightningModule):
    """A module that is trained with a step of its own."""

    def __init__(self, model, step, make_optimizer):
        super().__init__()
        self.model, self.step, self.make_optimizer = model, step, make_optimizer

    def training_step(self, batch, batch_idx):
        return self.step(self.model, batch)

    def configure_optimizers(self):
        return self.make_optimizer(list(self.parameters()))

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zero_grad()


def peaks_of_fit(module, batch, *, steps=2, accumulate=1, clip=None, precision="32-true", strategy="auto"):
    """Peak allocated and peak reserved of a fit of a copy of a LightningModule."""
    module = copy.deepcopy(module)
    options = {"precision": precision}
    if precision == "16-mixed":
        # Not 65536, from where on float16 overflows here, and a scaler skips the optimizer's step.
        options = {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=1.0))]}
    if precision in HALF:
        module.to(HALF[precision])
    device = VirtualDevice()
    with device:
        device.track(module)
        options |= {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        run = trainer(None, devices=1, strategy=strategy, logger=False, **options)
        run.fit(module, DataLoader(Batches(batch, steps * accumulate), batch_size=None))
    stats = device.stats()
    return stats.peak_allocated, stats.peak_reserved


def peaks_of_real_run(model, batch, step, make_optimizer, **options):
    """Peak allocated and peak reserved of a fit of a copy of any model with a step."""
    return peaks_of_fit(Stepped(copy.deepcopy(model).train(), step, make_optimizer), batch, **options)
