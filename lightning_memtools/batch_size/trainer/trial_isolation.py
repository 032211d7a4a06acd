"""Keeps trials apart from the run: the callbacks that take part, the logger, and no collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_memtools._lightning import part_of_lightning
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import refused_collectives
from lightning_memtools.reporting.strategies import why_unsupported

_LIGHTNINGS_WATCHERS = tuple(
    getattr(part_of_lightning("callbacks"), name)
    for name in (
        "BasePredictionWriter", "BatchSizeFinder", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping",
        "LearningRateFinder", "LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor", "Timer",
    )
)  # fmt: skip


class CollectiveInTrialError(RuntimeError):
    """Raised where a rank starts a collective in the middle of a trial."""


def why_no_trials(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why no trial can be run with this strategy and model; None where trials can be run."""
    reason = why_unsupported("BatchSizeTuner", type(trainer.strategy))
    if reason is not None:
        return reason
    sharded = next((p for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if sharded is not None or any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
        return (
            "the model is sharded (FSDP, DTensor): its forward gathers parameters from all ranks, and a rank that runs "
            "out of memory in a trial would leave the others waiting. Set the size by hand"
        )
    if trainer.world_size > 1 and any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
        return (
            "SyncBatchNorm exchanges statistics in every forward, and a rank that runs out of memory in a trial would "
            "leave the others waiting. Tune with sync_batchnorm=False (its memory is the same but for a few vectors) "
            "and set the size that is found"
        )
    return None


def takes_part(callback: Callback) -> bool:
    """Return True if a callback takes part in trials: all but those that only watch, write files or stop training.

    A callback stays out of trials with a class attribute `takes_part_in_trials = False`.
    """
    return getattr(callback, "takes_part_in_trials", True) and not isinstance(callback, _LIGHTNINGS_WATCHERS)


@contextmanager
def left_out_of_counts(trainer: Trainer, reader: MemoryReader | None) -> Iterator[None]:
    """Keep allocation retries and out-of-memory errors that happen within out of the counts of the run."""
    before = MemoryStats() if reader is None else reader.stats()
    try:
        yield
    finally:
        now = MemoryStats() if reader is None else reader.stats()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Neighbour):
                callback.leave_out_of_counts(
                    alloc_retries=(now.alloc_retries or 0) - (before.alloc_retries or 0),
                    ooms=(now.ooms or 0) - (before.ooms or 0),
                )


def no_collectives() -> AbstractContextManager[None]:
    """Refuse collectives: one that is started inside raises, naming it, so that no rank waits."""
    return refused_collectives(
        lambda name: CollectiveInTrialError(
            f"The collective {name!r} was called while BatchSizeTuner ran a batch size, by torch.distributed in "
            "your own code or in a library's. A rank that fails would leave the others waiting in it. Next: leave "
            "it out of the steps while tuning, or tune with devices=1 and set the size that is found."
        )
    )


class QuietLogger(DummyLogger):
    """Accepts everything and writes nothing.

    Args:
        root: A temporary directory, for callbacks that ask for the logger's directory.
    """

    def __init__(self, root: str) -> None:
        super().__init__()
        self._directory = root

    @property
    def save_dir(self) -> str:
        """The temporary directory."""
        return self._directory

    @property
    def log_dir(self) -> str:
        """The temporary directory."""
        return self._directory
