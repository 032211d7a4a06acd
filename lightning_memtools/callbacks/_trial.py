"""One batch size, run through the Trainer's own loops, and nothing of it left."""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
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
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_memtools.batchsize.limits import Limits, samples_in_shared_memory
from lightning_memtools.batchsize.loaders import WorstCase, batch_size_of, drops_last, n_samples_of, worst_first
from lightning_memtools.batchsize.memento import Memento
from lightning_memtools.batchsize.trials import Reading, Trial
from lightning_memtools.callbacks._collectives import CollectiveInTrial, bucket_bytes, no_collectives
from lightning_memtools.callbacks._sized import Places, SizedSource
from lightning_memtools.memory.oom import error_chain, is_killed_worker, is_out_of_memory
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.stages import Stage
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.reporting._lightning import (
    batches_in_evaluation,
    forget_loaders,
    loop_of,
    prepared_loaders,
    set_root_directory,
    without_collectives,
)
from lightning_memtools.reporting.ranks import RankGather

_WATCHERS = (
    BasePredictionWriter, BatchSizeFinder, Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateFinder,
    LearningRateMonitor, ModelSummary, ProgressBar, ThroughputMonitor, Timer,
)  # fmt: skip
# Of this library: those that only watch, write files, or stop training. By name, as they may not be imported.
_OUR_WATCHERS = {"MemoryMonitor", "LossCurves", "OOMReport", "HaltOnNaN", "TrainingDoctor"}

# What a rank tells the others of a failure, as a number.
_FAILURES = (
    "",
    "out of memory",
    "allocation retry",
    "a data-loader worker was killed",
    "the data gave no batch",
    "an error of another kind",
)
_ERROR = _FAILURES.index("an error of another kind")

# Enough for any schedule of optimizer steps that a trial should wait for.
_MOST_BATCHES = 64
_STEPS = 2


class TrialOver(BaseException):
    """Ends a trial from inside the loops. No Exception, so that users' `except Exception` lets it pass."""


class Probe(Callback):
    """Reads the device while a trial runs, and ends the trial when it has seen enough. Comes after all callbacks.

    Args:
        peaks: Opens a peak window; None where the device keeps no statistics.
    """

    def __init__(self, reader: MemoryReader | None, *, accumulate: int) -> None:
        self.batches = 0
        self.base_allocated: int | None = None
        self.batch_bytes = 0
        self.observed_size: int | None = None
        self.whole: PeakWindow | None = None
        self.batch: PeakWindow | None = None
        self.eval_batches = 0
        self._reader = reader
        self._steps = 0
        self._stepped = False
        self._accumulate = accumulate
        if reader is not None:
            self.whole = peak_counter(reader).open()
            self.batch = peak_counter(reader).open()
            self.whole.resume()
            self.batch.resume()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """What is held now, without the batch, does not depend on its size."""
        self._see(batch)
        if self.batch is not None and self.batches:
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
        """End after two optimizer steps: the second is the peak, with gradients and optimizer state there."""
        self.batches += 1
        self._steps += self._stepped
        self._stepped = False
        enough = self._steps >= _STEPS and not self._is_skipping(trainer)
        if enough or self.batches >= _MOST_BATCHES * self._accumulate:
            raise TrialOver

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        """As in training."""
        self._see(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """End after the batches that were asked for."""
        self.batches += 1
        if self.batches >= self.eval_batches:
            raise TrialOver

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _see(self, batch: Any) -> None:
        tensors = _tensors(batch)
        self.batch_bytes = max(self.batch_bytes, sum(one.numel() * one.element_size() for one in tensors))
        if self.observed_size is None and tensors and tensors[0].ndim:
            self.observed_size = len(tensors[0])
        if self._reader is not None and self.batches:
            allocated = self._reader.stats().allocated
            self.base_allocated = None if allocated is None else max(allocated - self.batch_bytes, 0)

    def _is_skipping(self, trainer: Trainer) -> bool:
        """Whether the first steps were left out by a gradient scaler that still looks for its scale."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return scaler is not None and self._steps < 16 and not any(o.state for o in trainer.optimizers)  # noqa: PLR2004


class TrialRunner:
    """Runs batch sizes; after each, everything is as it was when the runner was made.

    Args:
        trainer: In its hook that comes before a loop's work.
        reader: Tells the device's memory; None where nobody can.
        places: Where the size is written.
        sources: The loops' sources, by stage.
        sizes: The size per stage that the sources read; changed by each trial.
        margin: What has to stay free: a share of the capacity, or bytes.
        accumulate_for: Micro-batches per optimizer step that go with a training size.
        hooks: What is still to be called before the loop, in a real run.
        worst_case: See `worst_first`.
        root: A folder for files that hooks write meanwhile.
        owner: The tuner's type: it keeps the score, so it is not put back.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        reader: MemoryReader | None,
        places: Places,
        sources: Mapping[Stage, SizedSource],
        sizes: dict[Stage, int | None],
        margin: float,
        accumulate_for: Callable[[int], int],
        hooks: Sequence[Callable[[], None]],
        worst_case: WorstCase | None,
        root: str,
        owner: type[Callback],
    ) -> None:
        self.trainer = trainer
        self._reader = reader
        self._places = places
        self._sources = sources
        self._sizes = sizes
        self._margin = margin
        self._accumulate_for = accumulate_for
        self._hooks = hooks
        self._worst_case = worst_case
        self._root = root
        self._gather = RankGather()
        self._froze = False
        # What loaders said their size was, by stage and by the size they were asked for.
        self.loader_sizes: dict[Stage, dict[int, int]] = {}
        device = VirtualDevice.current()
        datamodule = getattr(trainer, "datamodule", None)
        self._memento = Memento(
            [trainer, trainer.lightning_module, datamodule],
            skip=(Logger, VirtualDevice, owner),
            **({} if device is None else {"host": device.host}),
        )

    def __enter__(self) -> Self:
        # What a failed trial leaves in circles has to be collected after each. Setting aside what is there already
        # makes that a matter of milliseconds; where somebody has done so before, theirs must stay set aside.
        self._froze = not gc.get_freeze_count()
        gc.collect()
        if self._froze:
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        if self._froze:
            gc.unfreeze()

    def run(self, stage: Stage, size: int, limits: Limits) -> Trial:
        """Run a size, or the largest admitted one below it once the data have shown how many samples there are.

        Raises:
            Exception: What the user's code raises, if it is not about memory, as it is.
        """
        begin = time.perf_counter()
        if self._reader is not None:
            self._reader.empty_cache()
        trial_stages: list[Stage] = ["train", stage] if stage == "val" and self._is_fitting else [stage]
        probe: Probe | None = None
        failure, error = 0, None
        before = None if self._reader is None else self._reader.stats()
        began = before
        try:
            self._prepare(stage, size)
            size = self._set_up_data(stage, size, limits)
            held = self._bucket()
            for one in trial_stages:
                began = None if self._reader is None else self._reader.stats()
                probe = Probe(self._reader, accumulate=self.trainer.accumulate_grad_batches)
                failure, error = self._run_loop(one, probe)
                if probe.whole is not None and probe.batch is not None:
                    probe.whole.pause()
                    probe.batch.pause()
                if failure or error is not None:
                    break
            del held
            assert probe is not None
            if not failure and not probe.batches:
                failure = _FAILURES.index("the data gave no batch")
            reading = self._reading(probe, before, began, failure, after_training=len(trial_stages) > 1)
            size = self._learn(probe, stage, size, limits)
        finally:
            # In this order: what is written back lets go of what the trial made.
            for one in trial_stages:
                forget_loaders(loop_of(self.trainer, one))
            self._memento.restore()
            self._empty()
        readings = self._agree(reading, error)
        return Trial(
            stage=stage,
            size=size,
            readings=readings,
            seconds=time.perf_counter() - begin,
            accumulate=self._accumulate_for(size) if stage == "train" else 1,
        )

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def _prepare(self, stage: Stage, size: int) -> None:
        """Everything set here is put back by the memento."""
        trainer = self.trainer
        self._sizes[stage] = size
        if stage == "train" or (stage == "val" and self._is_fitting):
            train_size = self._sizes.get("train")
            if train_size is not None:
                self._places.write("train", train_size)
                # More micro-batches than two have the same memory as two.
                trainer.accumulate_grad_batches = min(self._accumulate_for(train_size), 2)
            else:
                trainer.accumulate_grad_batches = min(trainer.accumulate_grad_batches, 2)
        own = [callback for callback in trainer.callbacks if takes_part(callback)]  # type: ignore[attr-defined]
        trainer.callbacks = own  # type: ignore[attr-defined]
        trainer.loggers = [QuietLogger(self._root)] if trainer.loggers else []
        set_root_directory(trainer, self._root)
        trainer.limit_train_batches = 1.0
        trainer.limit_val_batches = min(2, trainer.limit_val_batches) if type(trainer.limit_val_batches) is int else 2
        trainer.limit_test_batches = trainer.limit_predict_batches = 2
        trainer.num_sanity_val_steps = 0
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.epoch_loop.max_steps = -1
        # A scheduler takes no memory, and may ask for metrics that are not there yet. In manual optimization the
        # user's code steps them.
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        for hook in self._hooks:
            hook()

    def _set_up_data(self, stage: Stage, size: int, limits: Limits) -> int:
        """Make the loaders, on all ranks at once; again with a smaller size if there are fewer samples."""
        admitted = size
        for _ in range(2):
            self._sizes[stage] = admitted
            if stage == "train":
                self._places.write("train", admitted)
                self.trainer.accumulate_grad_batches = min(self._accumulate_for(admitted), 2)
            for one in ("train", "val") if stage == "val" and self._is_fitting else (stage,):
                self._load(one)
            loaders = prepared_loaders(loop_of(self.trainer, stage))
            own = batch_size_of(loaders[0]) if loaders else None
            if own is not None:
                self.loader_sizes.setdefault(stage, {})[admitted] = own
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
            source.alter = lambda loader: worst_first(loader, n_worst, self._worst_case)
        loop = loop_of(trainer, stage)
        forget_loaders(loop)
        self._switch(stage)
        # Advice on the sizes of a trial is of no use to anybody.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            # So that it does not ask for the validation loader or complain of a check interval.
            limit, interval = trainer.limit_val_batches, trainer.val_check_interval
            if stage == "train":
                trainer.limit_val_batches, trainer.val_check_interval = 0, 1.0
            loop.setup_data()
            trainer.limit_val_batches, trainer.val_check_interval = limit, interval

    def _switch(self, stage: Stage) -> None:
        trainer = self.trainer
        if stage == "train":
            trainer.training = True
        elif stage == "val":
            trainer.validating = True
        elif stage == "test":
            trainer.testing = True
        else:
            trainer.predicting = True

    def _bucket(self) -> torch.Tensor | None:
        """DDP's buckets, which are no tensors and which a simulated device therefore does not see."""
        model = self.trainer.strategy.model
        n_bytes = bucket_bytes(model)
        self.trainer.strategy.model = self.trainer.lightning_module
        if n_bytes and self._reader is not None and self._reader.simulated:
            return torch.empty(n_bytes, dtype=torch.uint8)
        return None

    def _run_loop(self, stage: Stage, probe: Probe) -> tuple[int, BaseException | None]:
        """Run a loop until the probe ends it. Returns the failure's number, and the error if it is of another kind."""
        trainer = self.trainer
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Probe)] + [probe]  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            without_collectives(trainer)
        self._switch(stage)
        loop = loop_of(trainer, stage)
        limit = trainer.limit_val_batches
        try:
            with no_collectives(), warnings.catch_warnings():
                warnings.simplefilter("ignore", PossibleUserWarning)
                if stage == "train":
                    trainer.limit_val_batches = 0
                else:
                    probe.eval_batches = batches_in_evaluation(loop)
                    if self._is_fitting:  # as before the real validation
                        trainer.lightning_module.on_validation_model_zero_grad()
                loop.run()
        except TrialOver as over:
            traceback.clear_frames(over.__traceback__)
        except BaseException as error:  # noqa: BLE001, it is judged, and raised again on all ranks if it is the user's
            for one in error_chain(error):
                traceback.clear_frames(one.__traceback__)
            if not isinstance(error, CollectiveInTrial) and is_out_of_memory(error):
                return _FAILURES.index("out of memory"), None
            if is_killed_worker(error):
                return _FAILURES.index("a data-loader worker was killed"), None
            return _ERROR, error
        finally:
            trainer.limit_val_batches = limit
        return 0, None

    def _reading(self, probe: Probe, before: Any, began: Any, failure: int, *, after_training: bool) -> Reading:
        if self._reader is None or probe.whole is None or probe.batch is None:
            return Reading(failure=_FAILURES[failure])
        stats = self._reader.stats()
        retries = (stats.alloc_retries or 0) - (before.alloc_retries or 0)
        if not failure and (stats.ooms or 0) > (before.ooms or 0):
            failure = _FAILURES.index("out of memory")  # somebody's code caught it and went on
        # Where validation follows training, the allocator may once give back what training has cached. What is cached
        # is no need of validation's, so only what tensors hold is held against the limit.
        if not failure and retries and not after_training:
            failure = _FAILURES.index("allocation retry")
        others = max((stats.device_used or 0) - (stats.reserved or 0), 0)
        taken = probe.whole.allocated if after_training else probe.whole.reserved
        return Reading(
            peak=None if taken is None else taken + others,
            limit=None if stats.capacity is None else _limit(stats.capacity, self._margin),
            peak_allocated=probe.whole.allocated,
            batch_allocated=probe.batch.allocated,
            base_allocated=probe.base_allocated,
            peak_before=None if began.reserved is None else began.reserved + others,
            failure=_FAILURES[failure],
        )

    def _learn(self, probe: Probe, stage: Stage, size: int, limits: Limits) -> int:
        """Take over what the batches told; returns the size that they really had."""
        loaders = prepared_loaders(loop_of(self.trainer, stage))
        per_sample = probe.batch_bytes / size
        limits.shm = samples_in_shared_memory(per_sample, [one for one in loaders if isinstance(one, DataLoader)])
        only_streams = loaders and all(isinstance(getattr(one, "dataset", None), IterableDataset) for one in loaders)
        if only_streams and probe.observed_size is not None and probe.observed_size < size:
            limits.n_samples = probe.observed_size  # the stream has no more than that
            return probe.observed_size
        return size

    def _agree(self, reading: Reading, error: BaseException | None) -> tuple[Reading, ...]:
        """Every rank's reading, on every rank; an error of one of them ends all."""
        figures = (reading.peak, reading.limit, reading.peak_allocated, reading.batch_allocated, reading.base_allocated,
                   reading.peak_before)  # fmt: skip
        mine = [float(_FAILURES.index(reading.failure)), *(-1.0 if one is None else float(one) for one in figures)]
        everyone = self._gather(mine)
        failed = [rank for rank, values in enumerate(everyone) if values[0] == _ERROR]
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(
                f"BatchSizeTuner stopped: rank {failed[0]} raised an error in its training or evaluation step, which "
                "is shown there."
            )
        return tuple(
            Reading(
                failure=_FAILURES[int(values[0])],
                peak=_known(values[1]),
                limit=_known(values[2]),
                peak_allocated=_known(values[3]),
                batch_allocated=_known(values[4]),
                base_allocated=_known(values[5]),
                peak_before=_known(values[6]),
            )
            for values in everyone
        )

    def _empty(self) -> None:
        gc.collect()
        if self._reader is not None:
            self._reader.empty_cache()


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


def _limit(capacity: int, margin: float) -> int:
    return capacity - margin if isinstance(margin, int) else int(capacity * (1 - margin))


def _known(value: float) -> int | None:
    return None if value < 0 else int(value)


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
