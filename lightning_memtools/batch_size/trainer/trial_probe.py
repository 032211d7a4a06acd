"""Measures the memory of a trial, ends it when enough was measured, and tells all ranks how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools._lightning import EitherCallback, gradient_scaler
from lightning_memtools.batch_size.batch_size_result import RankReading
from lightning_memtools.batch_size.trainer.trial_isolation import CollectiveInTrialError
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.oom_errors import is_killed_worker, is_out_of_memory
from lightning_memtools.memory.peaks import PeakWindow, Stage, peak_counter
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.reporting.ranks import RankGather

STEPS = 2
"""Optimizer steps before and after validation: the second has the peak, with gradients and optimizer state."""
# More micro-batches per step than any schedule of optimizer steps needs that a trial should wait for.
_MOST_BATCHES = 64
# A gradient scaler begins with 65536 and halves: after so many steps it has found its scale.
_SCALING_STEPS = 16

_IN_STAGE = {"train": " in training", "val": " in validation"}

FailureKind = Literal[
    "",
    "out of memory",
    "allocation retry",
    "a data-loader worker was killed",
    "the data gave no batch",
    "over the limit",
    "an error of another kind",
]


class TrialOver(BaseException):
    """Ends a trial from inside the loops. Not an Exception, so that a user's `except Exception` does not catch it."""


class TrialProbe(EitherCallback):
    """Measures the memory of a trial, and ends it when enough was measured. It comes after all other callbacks.

    Args:
        reader: Reads the device's memory; None where it cannot be read.
        accumulate: Micro-batches per optimizer step.
        validates: True if validation has to run before the trial ends.

    Attributes:
        stage: The stage that runs.
        whole: The highest use of the device by each stage.
        batch: The same for training until backward has ended, without what the optimizer allocates for its step.
        base_allocated: Bytes allocated before a batch, for each stage, from its second batch on.
        batch_bytes: The size of each stage's largest batch.
        batch_shapes: The shapes of each stage's batches, without the number of samples.
        observed_size: The number of samples in each stage's first batch.
        batches: How many batches of each stage have run to their end.
        eval_batches: The number of batches after which a trial of evaluation or prediction ends.
    """

    def __init__(self, reader: MemoryReader | None, *, accumulate: int, validates: bool = False) -> None:
        self.stage: Stage = "train"
        self.batches: dict[Stage, int] = {}
        self.base_allocated: dict[Stage, int] = {}
        self.batch_bytes: dict[Stage, int] = {}
        self.batch_shapes: dict[Stage, set[tuple[tuple[int, ...], ...]]] = {}
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
        """Begin or continue to measure a stage."""
        self.pause()
        self.stage = stage
        if self._reader is not None:
            self.whole.setdefault(stage, peak_counter(self._reader).open()).resume()

    def pause(self) -> None:
        """Stop measuring until a stage is entered again."""
        for window in [*self.whole.values(), *([self.batch] if self.batch is not None else [])]:
            window.pause()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure what is allocated besides the batch, which does not depend on its size."""
        self.enter("train")
        self._inspect(batch)
        if self.batch is not None:
            self.batch.resume()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Exclude what the optimizer allocates for its step, which does not depend on the batch either."""
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
        """Measure validation apart from training."""
        self.enter("val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the window of validation."""
        self.pause()
        self._validations += not trainer.sanity_checking
        if trainer.state.fn == TrainerFn.FITTING:
            self.stage = "train"  # the loop fetches its next batch now

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        """Measure what is allocated besides the batch."""
        self._inspect(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Outside of fit, end after `eval_batches`."""
        self._count()
        if self.eval_batches and self.batches[self.stage] >= self.eval_batches:
            raise TrialOver

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _count(self) -> None:
        self.batches[self.stage] = self.batches.get(self.stage, 0) + 1

    def _inspect(self, batch: Any) -> None:
        stage, tensors = self.stage, list(tensors_in(batch))
        n_bytes = sum(one.numel() * one.element_size() for one in tensors)
        self.batch_bytes[stage] = max(self.batch_bytes.get(stage, 0), n_bytes)
        self.batch_shapes.setdefault(stage, set()).add(tuple(tuple(one.shape[1:]) for one in tensors))
        if tensors and tensors[0].ndim:
            self.observed_size.setdefault(stage, len(tensors[0]))
        if self._reader is not None and self.batches.get(stage):
            allocated = self._reader.stats().allocated
            if allocated is not None:
                self.base_allocated[stage] = max(allocated - self.batch_bytes[stage], 0)

    def _is_skipping(self, trainer: Trainer) -> bool:
        """Returns True while a gradient scaler that still looks for its scale has skipped every step."""
        is_scaling = gradient_scaler(trainer) is not None and self._steps < _SCALING_STEPS
        return is_scaling and not any(optimizer.state for optimizer in trainer.optimizers)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The end of a trial on this rank.

    Attributes:
        failure: Why it failed; empty where it did not.
        where: The stage that failed, in words, where it is not the one that is tuned.
        error: The user's error, if it is not about memory.
    """

    failure: FailureKind = ""
    where: str = ""
    error: BaseException | None = None

    def gather(self, reading: RankReading, ranks: RankGather) -> tuple[RankReading, ...]:
        """Returns the readings of all ranks, on every rank. Collective.

        Raises:
            BaseException: The error that the user's code raised on this rank.
            RuntimeError: The user's code raised an error on another rank.
        """
        mine = (self.error is not None, replace(reading, failure=self.failure + self.where))
        everyone = ranks.objects(mine)
        if self.error is not None:
            raise self.error
        for rank, (has_error, _) in enumerate(everyone):
            if has_error:
                raise RuntimeError(
                    f"BatchSizeTuner stopped: rank {rank} raised an error in its training or evaluation step, which "
                    "is shown there."
                )
        return tuple(theirs for _, theirs in everyone)


def outcome_of_error(error: BaseException, stage: Stage, probe: TrialProbe) -> TrialOutcome:
    """Returns the outcome of a trial of `stage` that ended with an error."""
    where = "" if probe.stage == stage else _IN_STAGE[probe.stage]
    if not isinstance(error, CollectiveInTrialError) and is_out_of_memory(error):
        return TrialOutcome("out of memory", where)
    if is_killed_worker(error):
        return TrialOutcome("a data-loader worker was killed", where)
    return TrialOutcome("an error of another kind", where, error)


def outcome_without_error(
    stage: Stage, probe: TrialProbe, before: MemoryStats | None, now: MemoryStats | None, limit: int | None
) -> TrialOutcome:
    """Returns the outcome of a trial that raised no error: it may have failed all the same.

    Args:
        stage: The stage that is tuned.
        probe: What was measured.
        before: The device's statistics before the trial; None where they cannot be read.
        now: Those after it.
        limit: The highest use of the device that is allowed, in bytes.
    """
    if not probe.batches.get(stage):
        return TrialOutcome("the data gave no batch")
    if before is None or now is None:
        return TrialOutcome()
    if (now.ooms or 0) > (before.ooms or 0):
        return TrialOutcome("out of memory")  # the user's code, or a library's, caught it and went on
    if (now.alloc_retries or 0) > (before.alloc_retries or 0):
        return TrialOutcome("allocation retry")
    for other, window in probe.whole.items():
        is_over = limit is not None and window.reserved is not None and window.reserved + used_by_others(now) > limit
        if other != stage and is_over:
            return TrialOutcome("over the limit", _IN_STAGE[other])
    return TrialOutcome()


def reading_of(stage: Stage, probe: TrialProbe, now: MemoryStats | None, limit: int | None) -> RankReading:
    """Returns what this rank measured of a stage; empty where its device cannot be read."""
    window = probe.whole.get(stage)
    if now is None or window is None or probe.batch is None:
        return RankReading()
    return RankReading(
        peak=window.reserved,
        limit=None if limit is None else limit - used_by_others(now),
        peak_allocated=window.allocated,
        batch_allocated=probe.batch.allocated if stage == "train" else window.allocated,
        base_allocated=probe.base_allocated.get(stage),
    )


def used_by_others(stats: MemoryStats) -> int:
    """Returns the bytes of the device that this process's allocator has not reserved."""
    return max((stats.device_used or 0) - (stats.reserved or 0), 0)
