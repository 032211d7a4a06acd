"""Gives the cache back where training and validation could not lie side by side on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools.memory.stages import Stage
from lightning_memtools.memory.stats import MemoryReader


class Room(Callback):
    """Empties the cache between training and validation, so that each has the room that it was tried with.

    Blocks that one stage has cached do not fit the other's tensors. Where both sizes were chosen to fill the device,
    the second stage would begin with allocation retries, or run out of memory between the other's fragments.

    Args:
        reader: Tells the device's memory; None does nothing.
        limit: What all processes may take of the device, in bytes; None for no limit.
        peaks: What is taken of the device, by everybody, while a stage runs that began with an empty cache, in bytes. A
            stage that is not there always begins with one.
    """

    def __init__(self, reader: MemoryReader | None, limit: int | None, peaks: Mapping[Stage, int | None]) -> None:
        self._reader = reader
        self._limit = limit
        self._peaks = peaks
        self._was_validating = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make room for validation."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._make_room("val")
            self._was_validating = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make room for training, now that the last validation batch is gone."""
        if self._was_validating:
            self._was_validating = False
            self._make_room("train")

    def _make_room(self, stage: Stage) -> None:
        if self._reader is None:
            return
        need = self._peaks.get(stage)
        if need is not None:
            if self._limit is None:
                return
            stats = self._reader.stats()
            others = max((stats.device_used or 0) - (stats.reserved or 0), 0)
            # At the worst nothing of what is cached can be used, and all that is not held yet is reserved anew.
            more = max(need - others - (stats.allocated or 0), 0)
            if (stats.reserved or 0) + others + more <= self._limit:
                return
        self._reader.empty_cache()
