"""Applies the sizes that were found: to attributes, data loaders, optimizers, schedulers, and the allocator's cache."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_memtools._lightning import EitherCallback, forget_loaders, loop_of, prepared_loaders, source_of
from lightning_memtools._torch import inner_schedulers
from lightning_memtools.memory.peaks import Stage
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.state.random_state import RandomState, random_streams_restored
from lightning_memtools.state.state_snapshot import StateSnapshot


def renew_fit_loaders(trainer: Trainer, *, at_once: bool) -> None:
    """Have training and validation request their loaders again; in the middle of training it needs them at once."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        forget_loaders(loop)
    if at_once:
        with random_streams_restored():
            trainer.fit_loop.setup_data()
            for loader in prepared_loaders(trainer.fit_loop):
                for owner in (loader, getattr(loader, "batch_sampler", None)):
                    set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
                    if callable(set_epoch):
                        set_epoch(trainer.current_epoch)


class OptimizerSetup:
    """Observes the Trainer's setup of optimizers and schedulers, and can repeat it with the same random numbers."""

    def __init__(self) -> None:
        self._before: StateSnapshot | None = None
        self._random_after: RandomState | None = None

    def observe(self, trainer: Trainer) -> None:
        """Record the random streams when the Trainer sets up its optimizers."""
        strategy: Any = trainer.strategy
        set_up = strategy.setup_optimizers

        def observed(*args: Any, **kwargs: Any) -> None:
            strategy.__dict__.pop("setup_optimizers", None)
            self._before = StateSnapshot(_passed_loaders(trainer))
            set_up(*args, **kwargs)
            self._random_after = RandomState.now()

        strategy.setup_optimizers = observed

    def forget(self, trainer: Trainer) -> None:
        """Stop observing and discard what was recorded. Idempotent."""
        trainer.strategy.__dict__.pop("setup_optimizers", None)
        self._before = self._random_after = None

    def restore_random_streams(self) -> None:
        """Restore the random streams, and those of the passed loaders, to their state before the setup."""
        if self._before is not None:
            self._before.restore()

    def repeat(self, trainer: Trainer) -> None:
        """Set up the optimizers again, with the random numbers of the first time.

        The result is that of a model which had its present batch size from the beginning.
        """
        now = RandomState.now()
        is_undisturbed = self._random_after is not None and now == self._random_after
        self.restore_random_streams()
        trainer.strategy.setup_optimizers(trainer)
        trainer.strategy.setup_precision_plugin()
        if not is_undisturbed:
            now.restore()  # numbers were drawn since the first setup, and would have been drawn after this one too


def _passed_loaders(trainer: Trainer) -> list[Any]:
    sources = [source_of(loop_of(trainer, stage)) for stage in ("train", "val")]
    return [source.instance for source in sources if not source.is_module()]


def renew_schedulers(trainer: Trainer) -> bool:
    """Replace schedulers that step once per batch; return True if any was replaced.

    The new scheduler has the progress that it would have if all epochs so far had had the present batch size.
    Optimizers keep their state.
    """
    if not trainer.lightning_module.automatic_optimization:
        return False
    strategy: Any = trainer.strategy
    optimizers, old = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    with random_streams_restored():
        strategy.setup_optimizers(trainer)
    fresh, new = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    strategy.optimizers = optimizers
    steps = trainer.current_epoch * math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    renewed = False
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        if before.interval != "step" or before.reduce_on_plateau:
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            for _ in range(steps // before.frequency):
                after.scheduler.step()
        for source, target in zip(fresh, optimizers, strict=True):
            if after.scheduler.optimizer is source:
                _attach(after.scheduler, source, target)
        old[index] = after
        renewed = True
    strategy.lr_scheduler_configs = old
    return renewed


def _attach(scheduler: Any, source: Optimizer, target: Optimizer) -> None:
    """Attach a scheduler, and the schedulers that it is composed of, to another optimizer."""
    for group, into in zip(source.param_groups, target.param_groups, strict=True):
        into.update({key: value for key, value in group.items() if key != "params"})
    waiting = [scheduler]
    while waiting:
        one = waiting.pop()
        if getattr(one, "optimizer", None) is source:
            one.optimizer = target
        waiting += inner_schedulers(one)


class CacheReleaser(EitherCallback):
    """Empties the allocator's cache between training and validation, where both would not fit beside each other.

    Blocks that one stage has cached do not fit the other's tensors. Where both sizes were chosen to fill the device,
    the second stage would begin with allocation retries, or run out of memory between the other's fragments.

    Args:
        reader: Reads the device's memory; with None nothing is done.
        limit: The highest use of the device by all processes that is allowed, in bytes; None for no limit.
        peaks: The most that this process had reserved while a stage ran that began with an empty cache, in bytes.
            A stage that is not listed always begins with an empty cache.
    """

    def __init__(self, reader: MemoryReader | None, limit: int | None, peaks: Mapping[Stage, int | None]) -> None:
        self._reader = reader
        self._limit = limit
        self._peaks = peaks
        self._was_validating = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the cache for validation within fit."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._release_for("val")
            self._was_validating = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Empty the cache before training goes on: the last validation batch is freed only now."""
        if self._was_validating:
            self._was_validating = False
            self._release_for("train")

    def _release_for(self, stage: Stage) -> None:
        if self._reader is None:
            return
        need = self._peaks.get(stage)
        if need is not None:
            if self._limit is None:
                return
            stats = self._reader.stats()
            # In the worst case no cached block can be reused, and all that is not allocated yet is reserved anew.
            more = max(need - (stats.allocated or 0), 0)
            if (stats.reserved or 0) + stats.used_by_others + more <= self._limit:
                return
        self._reader.empty_cache()
