"""Measures the memory of a trial, ends the trial when enough was measured, and tells why it failed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_memtools._lightning import EitherCallback, gradient_scaler
from lightning_memtools.batch_size.batch_size_result import OUT_OF_MEMORY
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import batch_size_in, bytes_in
from lightning_memtools.memory.oom_errors import is_killed_worker, is_out_of_memory
from lightning_memtools.memory.peaks import PeakWindow, Stage, StagePeak, StageWatch, peak_counter
from lightning_memtools.memory.stats import MemoryReader, MemoryStats

STEPS = 2
"""Optimizer steps before and after validation: the second has the peak, with gradients and optimizer state."""
# A trial that takes more than this share of the limit goes on until reserved memory has stayed the same for as many
# optimizer steps as the second number says, but not beyond the third.
_VERIFIED_FROM, _STEADY_STEPS, _MOST_STEPS = 0.5, 3, 24
# More micro-batches per step than any schedule of optimizer steps needs that a trial should wait for.
_MOST_BATCHES = 64
# A gradient scaler begins with 65536 and halves: after so many steps it has found its scale.
_SCALING_STEPS = 16

_IN_STAGE = {"train": " in training", "val": " in validation"}

ANOTHER_ERROR = "another error"
"""The beginning of the failure of a trial that ended with an error that is not about memory."""


class TrialOver(BaseException):
    """Raised in a training loop to end a trial. Not an Exception, so that `except Exception` does not catch it."""


class CollectiveInTrialError(RuntimeError):
    """Raised if a rank calls a collective of torch.distributed during a trial."""


class TrialProbe(EitherCallback):
    """The callback that measures the memory of a trial run and ends the trial. It must be the last callback.

    A trial trains for two steps of every optimizer. If more than half of the limit is then reserved, it continues
    until reserved memory has not changed for three steps, because a later step may still reserve more. If more than
    the limit is reserved, the cache is emptied once and the peak is measured again: on a device with that limit, the
    allocator would have emptied its cache, too.

    Args:
        reader: Reads the device's memory; None if it cannot be read.
        limit: The number of bytes of device memory that all processes together may use; None for no limit.
        validates: True if the trial must not end before validation has run.

    Attributes:
        stage: The stage that is running: "train" or "val".
        peaks: The peaks of allocated and of reserved memory in each stage.
        batch: Measures the peak of memory in training, except during optimizer steps.
        base_allocated: For each stage, the bytes allocated when the latest batch began, apart from the batch itself.
        observed_size: The number of samples in each stage's first batch.
        batches: The number of completed batches of each stage.
    """

    def __init__(self, reader: MemoryReader | None, limit: int | None, *, validates: bool) -> None:
        self.stage: Stage = "train"
        self.peaks: dict[Stage, StagePeak] = {}
        self.batches: dict[Stage, int] = {}
        self.base_allocated: dict[Stage, int] = {}
        self.observed_size: dict[Stage, int] = {}
        self.batch: PeakWindow | None = None if reader is None else peak_counter(reader).open()
        self._reader = reader
        self._before = self.stats()
        self._watch: StageWatch | None = None
        self._limit = limit
        self._validates = validates
        self._stepped: dict[int, int] = {}  # optimizers, by the steps that each has made
        self._reserved: list[int] = []  # after each step
        self._has_released = self._has_stepped = self._has_validated = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None, "_watch": None, "batch": None}  # a copy of the Trainer measures nothing

    def begin(self, stage: Stage) -> None:
        """Begin to measure the memory of a stage."""
        self.stage = stage
        if self._reader is not None:
            self._watch = StageWatch(peak_counter(self._reader))
            self._watch.enter(stage)

    def end(self) -> None:
        """Stop measuring. Idempotent."""
        if self.batch is not None:
            self.batch.pause()
        if self._watch is not None:
            while self._watch.running is not None:
                self._watch.point(self._watch.running)
                self._watch.leave(self._watch.running)
            self.peaks |= self._watch.peaks
            self._watch.close()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record how much memory is allocated, not counting the batch, and begin to measure the batch's peak."""
        self._inspect(batch)
        if self.batch is not None:
            self.batch.resume()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Stop measuring the batch's peak, since the memory of an optimizer step does not depend on the batch size."""
        self._has_stepped = True
        self._stepped[id(optimizer)] = self._stepped.get(id(optimizer), 0) + 1
        # With manual optimization another network's forward may follow.
        if self.batch is not None and pl_module.automatic_optimization:
            self.batch.pause()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise TrialOver if enough optimizer steps have run and reserved memory no longer grows."""
        self.batches["train"] = self.batches.get("train", 0) + 1
        if self._has_stepped:
            self._has_stepped = False
            self._reserved.append(self.stats().reserved or 0)
        is_long = self.batches["train"] >= _MOST_BATCHES * trainer.accumulate_grad_batches
        if is_long or (self._is_complete(trainer) and (self._is_steady() or len(self._reserved) >= _MOST_STEPS)):
            if is_long or self._has_released or not self._is_over_limit():
                raise TrialOver
            self._release()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring the memory of validation, separately from that of training."""
        self.stage = "val"
        if self._watch is not None:
            self._watch.enter("val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring the memory of validation, and resume measuring the memory of training."""
        if self._watch is not None:
            self._watch.point("val")
            self._watch.leave("val")
        self._has_validated = True
        trainer.check_val_every_n_epoch = 2**62  # this fit validates no more
        self.stage = "train"

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        """Record how much memory is allocated, not counting the batch."""
        self._inspect(batch)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Count this validation batch."""
        self.batches["val"] = self.batches.get("val", 0) + 1

    def _inspect(self, batch: Any) -> None:
        stage, size = self.stage, batch_size_in(batch)
        if size is not None:
            self.observed_size.setdefault(stage, size)
        if self._reader is not None and self.batches.get(stage):
            allocated = self._reader.stats().allocated
            if allocated is not None:
                self.base_allocated[stage] = max(allocated - bytes_in(batch), 0)

    def _is_complete(self, trainer: Trainer) -> bool:
        """Return True if every optimizer has made enough steps and, where required, validation has run."""
        if any(self._stepped.get(id(optimizer), 0) < STEPS for optimizer in trainer.optimizers):
            return False
        # A gradient scaler that still looks for its scale skips every step.
        is_scaling = gradient_scaler(trainer) is not None and len(self._reserved) < _SCALING_STEPS
        if is_scaling and not any(optimizer.state for optimizer in trainer.optimizers):
            return False
        enough = self._has_validated and len(self._reserved) >= 2 * STEPS if self._validates else True
        return enough and len(self._reserved) >= STEPS

    def _is_steady(self) -> bool:
        """Return True if reserved memory has not changed for three steps, or is less than half of the limit."""
        last = self._reserved[-_STEADY_STEPS - 1 :]
        is_small = self._limit is None or last[-1] < _VERIFIED_FROM * self._limit
        return is_small or (len(last) > _STEADY_STEPS and len(set(last)) == 1)

    def _is_over_limit(self) -> bool:
        if self._watch is None or self._reader is None or self._limit is None:
            return False
        self._watch.point("train")
        others = self._reader.stats().used_by_others
        return (self._watch.peaks["train"].reserved or 0) + others > self._limit

    def _release(self) -> None:
        """Empty the allocator's cache, and restart the measurement of training memory."""
        assert self._reader is not None
        self.end()
        self._has_released = True
        self._reserved.clear()
        self._reader.empty_cache()
        self.begin("train")

    def failure(self, stage: Stage, error: BaseException | None) -> str:  # noqa: PLR0911, one return for each reason
        """Return why the trial of a stage failed; "" if it succeeded. `error` is the error that ended it, if any."""
        where = "" if self.stage == stage else _IN_STAGE[self.stage]
        if error is not None:
            if not isinstance(error, CollectiveInTrialError) and is_out_of_memory(error):
                return OUT_OF_MEMORY + where
            if is_killed_worker(error):
                return "a data-loader worker was killed" + where
            return f"{ANOTHER_ERROR}{where}: {in_one_line(error)}"
        if not self.batches.get(stage):
            return "the data gave no batch"
        now = self.stats()
        if (now.ooms or 0) > (self._before.ooms or 0):
            return OUT_OF_MEMORY  # the user's code, or a library's, caught it and went on
        if (now.alloc_retries or 0) > (self._before.alloc_retries or 0):
            return "allocation retry"
        for other, peak in self.peaks.items():
            if other != stage and self._limit is not None and (peak.reserved or 0) + now.used_by_others > self._limit:
                return "over the limit" + _IN_STAGE[other]
        return ""

    def measured(self, stage: Stage) -> dict[str, int | None]:
        """Return the memory measured in a stage, as keyword arguments for SizeTrial; {} if none was measured."""
        peak = self.peaks.get(stage)
        if peak is None or self.batch is None:
            return {}
        return {
            "peak": peak.reserved,
            "limit": None if self._limit is None else self._limit - self.stats().used_by_others,
            "peak_allocated": peak.allocated,
            "batch_allocated": (self.batch if stage == "train" else peak).allocated,
            "base_allocated": self.base_allocated.get(stage),
        }

    def stats(self) -> MemoryStats:
        """Return the memory statistics of the device; all None if they cannot be read."""
        return MemoryStats() if self._reader is None else self._reader.stats()
