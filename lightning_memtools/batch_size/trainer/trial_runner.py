"""Runs a trial of one batch size in the Trainer's own loops, and restores everything afterwards."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_memtools._lightning import (
    callbacks_of,
    forget_loaders,
    loop_of,
    prepared_loaders,
    replace_loaders,
    set_root_directory,
    validate_every,
    without_collectives,
)
from lightning_memtools.batch_size.batch_size_result import SizeTrial, tightest
from lightning_memtools.batch_size.resized_loaders import CannotResizeError, SampleSizes, known_sizes, worst_first
from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings
from lightning_memtools.batch_size.trainer.stage_sizes import StageSizes, has_data
from lightning_memtools.batch_size.trainer.trial_probe import (
    ANOTHER_ERROR,
    STEPS,
    CollectiveInTrialError,
    TrialOver,
    TrialProbe,
)
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.loader_sizes import batch_size_of, drops_last, n_samples_of
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.peaks import Stage, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.virtual import VirtualDevice, host_memory
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import GROUP_LIMIT, RankGather, refused_collectives
from lightning_memtools.state.state_snapshot import StateSnapshot

_EVAL_BATCHES = 2
# Lightning's callbacks that only watch, write files or stop training.
_WATCHERS = {
    "BasePredictionWriter", "BatchSizeFinder", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping",
    "LearningRateFinder", "LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor", "Timer",
}  # fmt: skip


def takes_part(callback: Callback) -> bool:
    """Return True if a callback runs in trials. Lightning's callbacks that only monitor, save or stop training do not.

    Any other callback can opt out of trials with a class attribute `takes_part_in_trials = False`.
    """
    is_watcher = any(kind.__name__ in _WATCHERS for kind in type(callback).__mro__)
    return getattr(callback, "takes_part_in_trials", True) and not is_watcher


class TrialRunner:
    """Runs trials of batch sizes, and restores the model, the Trainer and the random generators after each trial.

    A trial runs what a fit runs: training, validation, and training again. It therefore also shows if one stage leaves
    too little memory for another.

    Args:
        trainer: The Trainer, in `on_fit_start`.
        settings: The arguments of BatchSizeTuner.
        batch_sizes: Reads and sets the batch sizes of the Trainer's loaders.
        hooks: The `on_fit_start` hooks to call at the beginning of each trial.
        root: A directory for files that hooks write during trials.

    Attributes:
        sizes: The batch size of each stage in the next trial. Stages that are missing here keep their own size.
        sample_sizes: The sizes of each loader's samples, keyed by (stage, index of the loader within the stage).
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: TunerSettings,
        batch_sizes: StageSizes,
        *,
        hooks: Sequence[Callable[[], None]],
        root: str,
    ) -> None:
        self.trainer = trainer
        self._settings = settings
        self._batch_sizes = batch_sizes
        self._per_rank = settings.per_rank(trainer.world_size)
        self._hooks = hooks
        self._root = root
        self._reader = reader = reader_for(trainer.strategy.root_device)
        self._validates = has_data(trainer, "val")
        self._stages: list[Stage] = ["train", "val"] if self._validates else ["train"]
        self._accumulate = trainer.accumulate_grad_batches
        self._ranks = RankGather(GROUP_LIMIT)
        self.sizes = dict(batch_sizes.of_hooks)
        self.sample_sizes: dict[tuple[Stage, int], SampleSizes | None] = {}
        self._ended: set[Stage] = set()  # the stages of which a trial has ended well
        self._first: dict[Stage, tuple[int, int | None]] = {}  # the first size asked for, and what loaders reported
        if reader is not None:
            peak_counter(reader).fold()  # the windows of others are in the snapshot and so do not see peaks of trials
        self._snapshot = StateSnapshot(
            [trainer, trainer.lightning_module, getattr(trainer, "datamodule", None)],
            skip=(Logger, VirtualDevice),
            host=host_memory,
        )

    def accumulate_for(self, size: int) -> int:
        """Return the number of micro-batches per optimizer step for a training batch size."""
        return self._accumulate if self._per_rank is None else max(self._per_rank // size, 1)

    def run(self, stage: Stage, size: int, limits: SizeLimits) -> SizeTrial:
        """Run a trial of a batch size. If the data has too few samples, try the largest possible size instead.

        Until a trial of the stage has succeeded, errors other than out-of-memory are raised. After that, they only
        mean that the size does not fit, since a large batch can also make an index or a kernel's grid too large.

        Args:
            stage: The stage whose batch size is searched for.
            size: The batch size to try.
            limits: The allowed sizes. This call sets the attributes that depend on the data, such as `n_samples`.

        Raises:
            Exception: Any error that the user's code raises.
            CannotResizeError: The loaders ignore the batch size that is set.
        """
        self.sizes[stage] = size
        if self._reader is not None:
            self._reader.empty_cache()
        limit, spare = self._settings.limit(self._reader)
        probe = TrialProbe(self._reader, limit, validates=self._validates)
        try:
            error = self._run_trial(stage, probe, limits)
            probe.end()
            failure = probe.failure(stage, error)
            if not failure.startswith(ANOTHER_ERROR) or (stage in self._ended and _may_depend_on_size(error)):
                error = None
            measured = probe.measured(stage)
            observed = probe.observed_size.get(stage)
            if limits.n_samples is None and observed is not None and observed < self.sizes[stage]:
                limits.n_samples = self.sizes[stage] = observed  # a stream, which is over before the batch is full
        finally:
            # In this order: restoring releases what the trial has allocated, and only then the cache can be emptied.
            for other in self._stages:
                forget_loaders(loop_of(self.trainer, other))
            self._snapshot.restore()
            free_failed_backward()
            gc.collect()
            if self._reader is not None:
                self._reader.empty_cache()
                peak_counter(self._reader).forget()
        ran = self.sizes[stage]
        is_configured = ran == self._batch_sizes.configured.get(stage)
        mine = SizeTrial(stage=stage, size=ran, spare=spare, failure=failure, is_configured=is_configured, **measured)
        trial = self._tightest_of_ranks(mine, error, is_bound=stage in self._ended)
        if not trial.failure:
            self._ended.add(stage)
        return trial

    def _run_trial(self, stage: Stage, probe: TrialProbe, limits: SizeLimits) -> BaseException | None:
        """Run the Trainer's loops until the probe stops them. Return an error that stopped them earlier, or None."""
        try:
            # Warnings about the sizes of a trial, and what callbacks print in it, are no use to the user.
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                self._prepare(probe)
                self._set_up_data(stage, limits)
                self._run_loops(probe)
        except TrialOver as over:
            forget_frames(over)
        except BaseException as raised:  # noqa: BLE001, raised again once all ranks know of it
            forget_frames(raised)
            return raised
        return None

    def _tightest_of_ranks(self, mine: SizeTrial, error: BaseException | None, *, is_bound: bool) -> SizeTrial:
        """Return the worst trial of all ranks. Raise `error`, and unless a size has run (`is_bound`), any rank's."""
        trials: list[SizeTrial] = self._ranks.objects(mine)
        if error is not None:
            raise error
        if len(trials) < self._ranks.world_size:
            raise RuntimeError("BatchSizeTuner stopped: another rank has ended, or did not answer.")
        for rank, trial in enumerate(trials):
            if trial.failure.startswith(ANOTHER_ERROR) and not is_bound:
                # Its text, and not the error: a class of the user's may not survive pickling.
                raise RuntimeError(f"BatchSizeTuner stopped: rank {rank} raised an error. {trial.failure}")
        return tightest(trials)

    def _prepare(self, probe: TrialProbe) -> None:
        """Set the Trainer up for a trial. All changes are undone after the trial."""
        trainer = self.trainer

        class QuietLogger(DummyLogger):  # callbacks find the temporary directory in it
            save_dir = log_dir = self._root

        # Unwrapped, since DDP runs collectives in forward and backward. Its buckets stay allocated, because the
        # snapshot holds the wrapper, and restores it.
        trainer.strategy.model = trainer.lightning_module
        callbacks = [callback for callback in callbacks_of(trainer) if takes_part(callback)]
        for callback in callbacks:
            if isinstance(callback, Neighbour):
                callback.is_in_trial = True
        trainer.callbacks = [*callbacks, probe]  # type: ignore[attr-defined]
        trainer.loggers = [QuietLogger()] if trainer.loggers else []
        set_root_directory(trainer, self._root)
        trainer.limit_train_batches = 1.0
        asked = trainer.limit_val_batches
        trainer.limit_val_batches = min(_EVAL_BATCHES, asked) if type(asked) is int else _EVAL_BATCHES
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        # A scheduler takes no memory, and may request metrics that do not exist yet. In manual optimization the user's
        # code steps them.
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        for hook in self._hooks:
            hook()

    def _set_up_data(self, stage: Stage, limits: SizeLimits) -> None:
        """Create the loaders of all stages. If there are too few samples for the batch size, reduce it and repeat."""
        asked = self.sizes[stage]
        for _ in range(2):
            for other in self._stages:
                self._load(other)
            loaders = prepared_loaders(loop_of(self.trainer, stage))
            self._check_that_loaders_follow(stage, batch_size_of(loaders[0]) if loaders else None)
            limits.n_samples = max((n for n in map(n_samples_of, loaders) if n is not None), default=None)
            limits.drop_last = all(map(drops_last, loaders))
            admitted = limits.round_down(asked)
            if admitted in {0, self.sizes[stage]}:
                break
            self.sizes[stage] = admitted
        for other in self._stages:
            self._take_largest(other)

    def _check_that_loaders_follow(self, stage: Stage, reported: int | None) -> None:
        """Raise CannotResizeError if the loaders' batch size, `reported`, did not change when another size was set."""
        asked, name = self.sizes[stage], self._settings.batch_arg_name
        first_asked, first_reported = self._first.setdefault(stage, (asked, reported))
        if reported is not None and reported == first_reported and asked != first_asked:
            hint = ' Or tune training alone: BatchSizeTuner(stages=("train",)).' if stage == "val" else ""
            raise CannotResizeError(
                f"The {stage}_dataloader gives batches of {reported} whatever {name} is (tried {first_asked} and "
                f"{asked}). Let the hook read it, as in DataLoader(..., batch_size=self.{name}).{hint}"
            )

    def _load(self, stage: Stage) -> None:
        trainer, loop, size = self.trainer, loop_of(self.trainer, stage), self.sizes.get(stage)
        if size is not None:
            self._batch_sizes.set(stage, size)
            if stage == "train":
                self._batch_sizes.write(size)
        # More micro-batches than two take no more memory.
        train = self.sizes.get("train")
        trainer.accumulate_grad_batches = min(self._accumulate if train is None else self.accumulate_for(train), 2)
        forget_loaders(loop)
        setattr(trainer, "training" if stage == "train" else "validating", True)
        # Otherwise it would request the validation loader, or complain about the check interval.
        limit, interval = trainer.limit_val_batches, trainer.val_check_interval
        if stage == "train":
            trainer.limit_val_batches, trainer.val_check_interval = 0, 1.0
        loop.setup_data()
        trainer.limit_val_batches, trainer.val_check_interval = limit, interval

    def _take_largest(self, stage: Stage) -> None:
        """Replace a stage's loaders by copies whose batches consist of the largest samples of this rank."""
        position = itertools.count()

        def change(loader: Any) -> Any:
            key = stage, next(position)
            if key not in self.sample_sizes:
                self.sample_sizes[key] = known_sizes(loader)
            return worst_first(loader, self.sample_sizes[key])

        loop = loop_of(self.trainer, stage)
        replace_loaders(loop, change)
        loop.setup_data = lambda: None  # an evaluation would ask for its loaders again

    def _run_loops(self, probe: TrialProbe) -> None:
        """Run the Trainer's fit loop, until the probe ends it by raising TrialOver."""
        trainer = self.trainer
        if trainer.world_size > 1:
            without_collectives(trainer)
        probe.begin("train")
        with refused_collectives(_refusal):
            trainer.training = True
            if self._validates:
                n_batches = min(STEPS * trainer.accumulate_grad_batches, trainer.num_training_batches)
                validate_every(trainer, int(n_batches) or 1)
            else:
                trainer.limit_val_batches = 0
            trainer.fit_loop.run()


def _may_depend_on_size(error: BaseException | None) -> bool:
    """Return True if a smaller batch might not raise this error. False for CUDA errors, after which nothing can run."""
    never = CollectiveInTrialError | CannotResizeError | torch.AcceleratorError
    return isinstance(error, Exception) and not isinstance(error, never)


def _refusal(name: str) -> CollectiveInTrialError:
    return CollectiveInTrialError(
        f"The collective {name!r} was called while BatchSizeTuner ran a batch size, by torch.distributed in your own "
        "code or in a library's. A rank that fails would leave the others waiting in it. Next: leave it out of the "
        "steps while tuning, or tune with devices=1 and set the size that is found."
    )
