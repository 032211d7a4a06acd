"""Who is present while a batch size is tried: callbacks and loggers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_memtools.callbacks.memory_monitor import MemoryMonitor
from lightning_memtools.memory.stats import MemoryReader, MemoryStats

_WATCHERS = (
    BasePredictionWriter, BatchSizeFinder, Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateFinder,
    LearningRateMonitor, ModelSummary, ProgressBar, ThroughputMonitor, Timer,
)  # fmt: skip
# Of this library: those that only watch, write files, or stop training. By name, as they may not be imported.
_OUR_WATCHERS = {"MemoryMonitor", "LossCurves", "OOMReport", "HaltOnNaN", "TrainingDoctor"}


def takes_part(callback: Callback) -> bool:
    """Whether a callback is present in trials: all are but those that only watch, write files or stop training.

    A callback of one's own stays away with a class attribute `takes_part_in_trials = False`.
    """
    kind = type(callback)
    if not getattr(callback, "takes_part_in_trials", True):
        return False
    if kind.__module__.startswith("lightning_memtools.") and kind.__name__ in _OUR_WATCHERS:
        return False
    return not isinstance(callback, _WATCHERS)


@contextmanager
def left_out_of_counts(trainer: Trainer, reader: MemoryReader | None) -> Iterator[None]:
    """Tell who counts allocation retries and out-of-memory errors of the run that those within are none of it."""
    before = MemoryStats() if reader is None else reader.stats()
    try:
        yield
    finally:
        now = MemoryStats() if reader is None else reader.stats()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MemoryMonitor):
                callback.leave_out(
                    alloc_retries=(now.alloc_retries or 0) - (before.alloc_retries or 0),
                    ooms=(now.ooms or 0) - (before.ooms or 0),
                )


class QuietLogger(DummyLogger):
    """Takes everything and writes nothing."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._directory = root

    @property
    def save_dir(self) -> str:
        """A folder that is removed."""
        return self._directory

    @property
    def log_dir(self) -> str:
        """A folder that is removed."""
        return self._directory
