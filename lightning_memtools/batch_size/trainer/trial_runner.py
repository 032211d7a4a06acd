"""Runs one batch size through the Trainer's own loops, and restores everything afterwards."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset

from lightning_memtools._lightning import (
    batches_in_evaluation,
    callbacks_of,
    forget_loaders,
    loop_of,
    prepared_loaders,
    run_sanity_check,
    set_root_directory,
    validate_every,
    without_collectives,
)
from lightning_memtools.batch_size.batch_size_result import RankReading, SizeTrial
from lightning_memtools.batch_size.resized_loaders import known_sizes, worst_first
from lightning_memtools.batch_size.sample_sizes import SampleSizes
from lightning_memtools.batch_size.size_limits import SizeLimits, TunerSettings, samples_per_rank
from lightning_memtools.batch_size.trainer.applied_sizes import CacheReleaser
from lightning_memtools.batch_size.trainer.sized_sources import BatchSizeAttributes, has_data, wrap_sources
from lightning_memtools.batch_size.trainer.trial_isolation import QuietLogger, no_collectives, takes_part
from lightning_memtools.batch_size.trainer.trial_probe import (
    ANOTHER_ERROR,
    STEPS,
    TrialOver,
    TrialProbe,
    failure_of,
    may_depend_on_size,
)
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.loader_sizes import batch_size_of, drops_last, n_samples_of
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.peaks import Stage, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice, host_memory
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import GROUP_LIMIT, RankGather
from lightning_memtools.state.state_snapshot import StateSnapshot

_EVAL_BATCHES = 2
# Optimizer steps over which samples per second are measured.
_TIMED_STEPS = 6


class TrialRunner:
    """Runs trials of batch sizes, and restores the model, the Trainer and the random streams after each.

    Within fit a trial consists of what a fit does: the sanity check, training, validation, and training again, without
    emptying the allocator in between. So a stage that leaves too little memory to another is noticed.

    Args:
        trainer: In its hook that comes before a loop's work.
        settings: The arguments of BatchSizeTuner.
        attributes: Hold the batch size.
        sizes: The size per stage that the loops' sources read; each trial changes it.
        stages: The stages whose loops a trial may run.
        begins: True if training has not begun, so that a sanity check may come first.
        hooks: Are called before the loop, as in a real run.
        root: A directory for files that hooks write during trials.
        not_restored: The type of objects that keep the results of trials.

    Attributes:
        loader_sizes: The sizes that loaders reported, by stage and by the size they were asked for.
        sample_sizes: The sizes of samples, by stage and the loader's position.
        batch_shapes: The shapes of the stages' batches without their first dimension.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: TunerSettings,
        attributes: BatchSizeAttributes,
        sizes: dict[Stage, int | None],
        stages: Sequence[Stage],
        *,
        begins: bool,
        hooks: Sequence[Callable[[], None]],
        root: str,
        not_restored: type,
    ) -> None:
        self.trainer = trainer
        self._settings = settings
        self._attributes = attributes
        self._sizes = sizes
        self._hooks = hooks
        self._root = root
        self._reader = reader = reader_for(trainer.strategy.root_device)
        self._sources = wrap_sources(trainer, stages, attributes, sizes.get)
        self._is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._validates = self._is_fitting and has_data(trainer, "val")
        self._sanity_steps = min(_EVAL_BATCHES, trainer.num_sanity_val_steps) if begins and self._validates else 0
        self._accumulate = trainer.accumulate_grad_batches
        effective = settings.effective_batch_size
        self.per_rank = None if effective is None else samples_per_rank(effective, trainer.world_size)
        self._ranks = RankGather(GROUP_LIMIT)
        self.loader_sizes: dict[Stage, dict[int, int]] = {}
        self.sample_sizes: dict[tuple[Stage, int], SampleSizes | None] = {}
        self.batch_shapes: dict[Stage, set[tuple[tuple[int, ...], ...]]] = {}
        if reader is not None:
            peak_counter(reader).fold()  # the windows of others are in the snapshot and so do not see peaks of trials
        self._snapshot = StateSnapshot(
            [trainer, trainer.lightning_module, getattr(trainer, "datamodule", None)],
            skip=(Logger, VirtualDevice, not_restored),
            host=host_memory,
        )

    def accumulate_for(self, size: int) -> int:
        """Return the micro-batches per optimizer step that belong to a training size."""
        return self._accumulate if self.per_rank is None else max(self.per_rank // size, 1)

    def run(self, stage: Stage, size: int, limits: SizeLimits, *, is_bound: bool = False) -> SizeTrial:
        """Run a size, or the largest admitted one below it once the loaders have shown how many samples there are.

        Args:
            stage: The stage that is tuned.
            size: The batch size.
            limits: The admitted sizes.
            is_bound: True if an error that is not about memory is a failure of this size, since a smaller one has run:
                an index or a kernel's grid may be too large. False raises it.

        Raises:
            Exception: The error of the user's code, unchanged.
        """
        begin = time.perf_counter()
        if self._reader is not None:
            self._reader.empty_cache()
        before = self._stats()
        error: BaseException | None = None
        reading = RankReading()
        try:
            self._prepare(stage, size)
            size = self._set_up_data(stage, size, limits)
            # Unwrapped, since DDP runs collectives in forward and backward. Its buckets stay allocated, because the
            # snapshot holds the wrapper, and restores it.
            self.trainer.strategy.model = self.trainer.lightning_module
            limit = self._settings.limit(self._reader)
            probe = TrialProbe(
                self._reader,
                limit,
                accumulate=self.trainer.accumulate_grad_batches,
                validates=self._validates,
                n_timed=_TIMED_STEPS if stage == "train" and self._settings.objective == "throughput" else 0,
            )
            error = self._run_loops(stage, probe)
            probe.pause()
            now = self._stats()
            failure = failure_of(probe, stage, error, before=before, now=now, limit=limit or math.inf)
            if not failure.startswith(ANOTHER_ERROR) or (is_bound and may_depend_on_size(error)):
                error = None
            reading = RankReading(failure=failure, seconds_per_batch=probe.seconds_per_batch)
            window = probe.whole.get(stage)
            if window is not None and probe.batch is not None:
                reading = RankReading(
                    peak=window.reserved,
                    limit=None if limit is None else limit - now.used_by_others,
                    peak_allocated=window.allocated,
                    batch_allocated=(probe.batch if stage == "train" else window).allocated,
                    base_allocated=probe.base_allocated.get(stage),
                    failure=failure,
                    seconds_per_batch=probe.seconds_per_batch,
                )
            for one, shapes in probe.batch_shapes.items():
                self.batch_shapes.setdefault(one, set()).update(shapes)
            size = self._learn_length_of_stream(limits, stage, probe, size)
        finally:
            # In this order: restoring releases what the trial has allocated, and only then the cache can be emptied.
            for one in self._stages(stage):
                forget_loaders(loop_of(self.trainer, one))
            self._snapshot.restore()
            self._release_memory()
        return SizeTrial(
            stage=stage,
            size=size,
            readings=self._readings_of_ranks(reading, error, is_bound=is_bound),
            seconds=time.perf_counter() - begin,
            accumulate=self.accumulate_for(size) if stage == "train" else 1,
        )

    def _readings_of_ranks(
        self, mine: RankReading, error: BaseException | None, *, is_bound: bool
    ) -> list[RankReading]:
        """Return the readings of all ranks, on every rank; raise an error of this rank. Collective."""
        readings: list[RankReading] = self._ranks.objects(mine)
        if error is not None:
            raise error
        if len(readings) < self._ranks.world_size:
            raise RuntimeError("BatchSizeTuner stopped: another rank has ended, or did not answer.")
        for rank, reading in enumerate(readings):
            if reading.failure.startswith(ANOTHER_ERROR) and not is_bound:
                raise RuntimeError(f"BatchSizeTuner stopped: rank {rank} raised an error in its step, shown there.")
        return readings

    def _stats(self) -> MemoryStats:
        return MemoryStats() if self._reader is None else self._reader.stats()

    def _stages(self, stage: Stage) -> list[Stage]:
        """Return the stages whose loops a trial runs."""
        if not self._is_fitting:
            return [stage]
        return ["train", "val"] if self._validates else ["train"]

    def _prepare(self, stage: Stage, size: int) -> None:
        """Set the Trainer up for a trial. The snapshot restores all of it."""
        trainer = self.trainer
        self._sizes[stage] = size
        self._set_accumulation()
        trainer.callbacks = [callback for callback in callbacks_of(trainer) if takes_part(callback)]  # type: ignore[attr-defined]
        for callback in callbacks_of(trainer):
            if isinstance(callback, Neighbour):
                callback.is_in_trial = True
        trainer.loggers = [QuietLogger(self._root)] if trainer.loggers else []
        set_root_directory(trainer, self._root)
        trainer.limit_train_batches = 1.0
        asked = trainer.limit_val_batches
        trainer.limit_val_batches = min(_EVAL_BATCHES, asked) if type(asked) is int else _EVAL_BATCHES
        trainer.limit_test_batches = trainer.limit_predict_batches = _EVAL_BATCHES
        trainer.num_sanity_val_steps = self._sanity_steps
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        # A scheduler takes no memory, and may request metrics that do not exist yet. In manual optimization the user's
        # code steps them.
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        for hook in self._hooks:
            hook()

    def _set_accumulation(self) -> None:
        """Within fit, set the training size and at most 2 micro-batches: more of them take no more memory."""
        if not self._is_fitting:
            return
        size = self._sizes.get("train")
        if size is not None:
            self._attributes.write("train", size)
        self.trainer.accumulate_grad_batches = min(self._accumulate if size is None else self.accumulate_for(size), 2)

    def _set_up_data(self, stage: Stage, size: int, limits: SizeLimits) -> int:
        """Make the loaders, on all ranks at once; again with a smaller size if there are fewer samples."""
        admitted = size
        for _ in range(2):
            self._sizes[stage] = admitted
            self._set_accumulation()
            for one in self._stages(stage):
                self._load(one)
            loaders = prepared_loaders(loop_of(self.trainer, stage))
            reported = batch_size_of(loaders[0]) if loaders else None
            if reported is not None:
                self.loader_sizes.setdefault(stage, {})[admitted] = reported
            counts = [n for n in map(n_samples_of, loaders) if n is not None]
            limits.n_samples = max(counts, default=None)
            limits.drop_last = all(map(drops_last, loaders))
            admitted = limits.round_down(size)
            if admitted in {size, 0} or admitted == self._sizes[stage]:
                break
        return self._sizes[stage] or size

    def _load(self, stage: Stage) -> None:
        trainer, size = self.trainer, self._sizes.get(stage)
        n_worst = (size or 1) * trainer.world_size
        source = self._sources.get(stage)
        if source is not None:
            source.alter = self._with_worst_case(stage, n_worst)
        loop = loop_of(trainer, stage)
        forget_loaders(loop)
        setattr(trainer, {"train": "training", "val": "validating"}.get(stage, f"{stage}ing"), True)
        # Warnings about the sizes of a trial are no use to the user, and what holds for the fit too is said in the fit.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Otherwise it would request the validation loader, or complain about the check interval.
            limit, interval = trainer.limit_val_batches, trainer.val_check_interval
            if stage == "train":
                trainer.limit_val_batches, trainer.val_check_interval = 0, 1.0
            loop.setup_data()
            trainer.limit_val_batches, trainer.val_check_interval = limit, interval

    def _with_worst_case(self, stage: Stage, n: int) -> Callable[[Any], Any]:
        """Return a function that changes each of a stage's loaders to give the batch that takes the most memory."""
        position, worst_case = itertools.count(), self._settings.worst_case

        def change(loader: Any) -> Any:
            key = stage, next(position)
            if key not in self.sample_sizes:
                self.sample_sizes[key] = known_sizes(loader, worst_case)
            return worst_first(loader, n, worst_case, self.sample_sizes[key])

        return change

    def _run_loops(self, stage: Stage, probe: TrialProbe) -> BaseException | None:
        """Run until the probe has measured enough; return the error that came before."""
        trainer = self.trainer
        trainer.callbacks = [*trainer.callbacks, CacheReleaser(self._reader, None, {}), probe]  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            without_collectives(trainer)
        probe.enter("train" if self._is_fitting else stage)
        try:
            # What callbacks print and warn of in a trial is no use to the user either.
            with no_collectives(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                if self._is_fitting:
                    self._run_fit()
                else:
                    probe.eval_batches = batches_in_evaluation(loop_of(trainer, stage))
                    loop_of(trainer, stage).run()
        except TrialOver as over:
            forget_frames(over)
        except BaseException as error:  # noqa: BLE001, the user's errors are raised again once all ranks know of them
            forget_frames(error)
            return error
        return None

    def _run_fit(self) -> None:
        trainer = self.trainer
        trainer.training = True
        if self._validates:
            n_batches = min(STEPS * trainer.accumulate_grad_batches, trainer.num_training_batches)
            validate_every(trainer, int(n_batches) or 1)
            run_sanity_check(trainer)
        else:
            trainer.limit_val_batches = 0
        trainer.fit_loop.run()

    def _learn_length_of_stream(self, limits: SizeLimits, stage: Stage, probe: TrialProbe, size: int) -> int:
        """Return the size that the batches really had: a stream that yields smaller batches has no larger ones."""
        loaders = prepared_loaders(loop_of(self.trainer, stage))
        only_streams = loaders and all(isinstance(getattr(one, "dataset", None), IterableDataset) for one in loaders)
        observed = probe.observed_size.get(stage)
        if only_streams and observed is not None and observed < size:
            limits.n_samples = observed
            return observed
        return size

    def _release_memory(self) -> None:
        free_failed_backward()
        gc.collect()
        if self._reader is not None:
            self._reader.empty_cache()
            peak_counter(self._reader).forget()
