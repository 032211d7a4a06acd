"""Reads the device while a batch size is tried, and says when enough was seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools._lightning import gradient_scaler
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.stages import Stage
from lightning_memtools.memory.stats import MemoryReader

STEPS = 2
"""Optimizer steps before and after validation: the second is the peak, with gradients and optimizer state there."""
# Enough for any schedule of optimizer steps that a trial should wait for.
_MOST_BATCHES = 64
# A gradient scaler begins with 65536 and halves: after so many steps it has found its scale.
_SCALING_STEPS = 16


class TrialOver(BaseException):
    """Ends a trial from inside the loops. No Exception, so that users' `except Exception` lets it pass."""


class Probe(Callback):
    """Reads the device while a trial runs, and ends the trial when it has seen enough. Comes after all callbacks.

    Args:
        reader: Tells the device's memory; None where nobody can.
        accumulate: Micro-batches per optimizer step.
        validates: Whether training is to be interrupted by validation before enough was seen.

    Attributes:
        stage: What is running.
        whole: What each stage took, at its highest.
        batch: The same in training until backward ended, without what the optimizer needs for its step.
        base_allocated: What tensors held before a batch, in bytes; of a stage's second batch on.
        batch_bytes: The size of a stage's largest batch.
        observed_size: The samples of a stage's first batch.
        batches: How many batches of a stage were run to their end.
        eval_batches: After how many an evaluation or prediction of its own is over.
    """

    def __init__(self, reader: MemoryReader | None, *, accumulate: int, validates: bool = False) -> None:
        self.stage: Stage = "train"
        self.batches: dict[Stage, int] = {}
        self.base_allocated: dict[Stage, int] = {}
        self.batch_bytes: dict[Stage, int] = {}
        self.observed_size: dict[Stage, int] = {}
        self.whole: dict[Stage, PeakWindow] = {}
        self.batch: PeakWindow | None = None if reader is None else peak_counter(reader).open()
        self.eval_batches = 0
        self._reader = reader
        self._accumulate = accumulate
        self._validates = validates
        self._steps = 0
        self._stepped = False
        self._validations = 0

    def enter(self, stage: Stage) -> None:
        """A stage begins, or goes on."""
        self.pause()
        self.stage = stage
        if self._reader is not None:
            self.whole.setdefault(stage, peak_counter(self._reader).open()).resume()

    def pause(self) -> None:
        """Look away."""
        for window in [*self.whole.values(), *([self.batch] if self.batch is not None else [])]:
            window.pause()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """What is held now, without the batch, does not depend on its size."""
        self.enter("train")
        self._see(batch)
        if self.batch is not None:
            self.batch.resume()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """What the optimizer needs for its step does not depend on the batch either."""
        self._stepped = True
        # With manual optimization another network's forward may follow.
        if self.batch is not None and pl_module.automatic_optimization:
            self.batch.pause()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End after two optimizer steps, or two more once validation has interrupted them."""
        self._count()
        self._steps += self._stepped
        self._stepped = False
        enough = self._steps >= (2 * STEPS if self._validates else STEPS) and not self._is_skipping(trainer)
        enough = enough and (self._validations > 0 or not self._validates)
        if enough or self.batches["train"] >= _MOST_BATCHES * self._accumulate:
            raise TrialOver

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation has a window of its own."""
        self.enter("val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on with its next batch."""
        self.pause()
        self._validations += not trainer.sanity_checking
        if trainer.state.fn == TrainerFn.FITTING:
            self.stage = "train"  # which fetches its next batch now

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        """As in training."""
        self._see(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Outside of fit, end after the batches that were asked for."""
        self._count()
        if self.eval_batches and self.batches[self.stage] >= self.eval_batches:
            raise TrialOver

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _count(self) -> None:
        self.batches[self.stage] = self.batches.get(self.stage, 0) + 1

    def _see(self, batch: Any) -> None:
        stage, tensors = self.stage, _tensors(batch)
        n_bytes = sum(one.numel() * one.element_size() for one in tensors)
        self.batch_bytes[stage] = max(self.batch_bytes.get(stage, 0), n_bytes)
        if tensors and tensors[0].ndim:
            self.observed_size.setdefault(stage, len(tensors[0]))
        if self._reader is not None and self.batches.get(stage):
            allocated = self._reader.stats().allocated
            if allocated is not None:
                self.base_allocated[stage] = max(allocated - self.batch_bytes[stage], 0)

    def _is_skipping(self, trainer: Trainer) -> bool:
        """Whether the first steps were left out by a gradient scaler that still looks for its scale."""
        is_scaling = gradient_scaler(trainer) is not None and self._steps < _SCALING_STEPS
        return is_scaling and not any(optimizer.state for optimizer in trainer.optimizers)


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, (list, tuple)):
        return [tensor for value in batch for tensor in _tensors(value)]
    if hasattr(batch, "__dict__"):
        return [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return []
