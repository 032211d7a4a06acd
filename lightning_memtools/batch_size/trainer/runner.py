"""One batch size, run through the Trainer's own loops, and nothing of it left."""

from __future__ import annotations

import contextlib
import gc
import io
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memtools._lightning import (
    batches_in_evaluation,
    forget_loaders,
    loop_of,
    prepared_loaders,
    run_sanity_check,
    set_root_directory,
    validate_every,
    without_collectives,
)
from lightning_memtools.batch_size.limits import Limits, samples_in_shared_memory
from lightning_memtools.batch_size.loaders import WorstCase, batch_size_of, drops_last, n_samples_of, worst_first
from lightning_memtools.batch_size.trainer.collectives import CollectiveInTrial, no_collectives
from lightning_memtools.batch_size.trainer.outcome import Outcome
from lightning_memtools.batch_size.trainer.places import Places
from lightning_memtools.batch_size.trainer.presence import QuietLogger, takes_part
from lightning_memtools.batch_size.trainer.probe import STEPS, Probe, TrialOver
from lightning_memtools.batch_size.trainer.room import Room
from lightning_memtools.batch_size.trainer.sources import SizedSource
from lightning_memtools.batch_size.trials import Reading, Trial
from lightning_memtools.memory.failed_backward import let_go_of_failed_backward
from lightning_memtools.memory.oom_errors import error_chain, is_killed_worker, is_out_of_memory
from lightning_memtools.memory.peaks import peak_counter
from lightning_memtools.memory.stages import Stage
from lightning_memtools.memory.stats import MemoryReader, MemoryStats
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.state.state_snapshot import StateSnapshot

_EVAL_BATCHES = 2
_IN = {"train": " in training", "val": " in validation"}


class TrialRunner:
    """Runs batch sizes; after each, everything is as it was when the runner was made.

    Within fit a trial is what a fit is: the sanity check, training, validation, and training again, in one state of
    the allocator. So what one stage leaves in the other's way is seen.

    Args:
        trainer: In its hook that comes before a loop's work.
        reader: Tells the device's memory; None where nobody can.
        places: Where the size is written.
        sources: The loops' sources, by stage.
        sizes: The size per stage that the sources read; changed by each trial.
        margin: What has to stay free: a share of the capacity, or bytes.
        accumulate_for: Micro-batches per optimizer step that go with a training size.
        validates: Whether training is interrupted by validation.
        begins: Whether training is still to begin, with a sanity check if the Trainer has one.
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
        validates: bool,
        begins: bool,
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
        self._validates = validates
        self._sanity_steps = min(_EVAL_BATCHES, trainer.num_sanity_val_steps) if begins and validates else 0
        self._hooks = hooks
        self._worst_case = worst_case
        self._root = root
        self._gather = RankGather()
        self._froze = False
        # What loaders said their size was, by stage and by the size they were asked for.
        self.loader_sizes: dict[Stage, dict[int, int]] = {}
        if reader is not None:
            peak_counter(reader).fold()  # what others watch: the memento keeps it, and trials are not added
        device = VirtualDevice.current()
        datamodule = getattr(trainer, "datamodule", None)
        self._snapshot = StateSnapshot(
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
        before = None if self._reader is None else self._reader.stats()
        try:
            self._prepare(stage, size)
            size = self._set_up_data(stage, size, limits)
            # Unwrapped: DDP runs collectives in forward and backward. Its buckets stay where they are, as the wrapper
            # does, which the memento puts back.
            self.trainer.strategy.model = self.trainer.lightning_module
            probe = Probe(self._reader, accumulate=self.trainer.accumulate_grad_batches, validates=self._validates)
            outcome = self._run_loops(stage, probe)
            probe.pause()
            if not outcome.failure and not probe.batches.get(stage):
                outcome.failure = "the data gave no batch"
            reading = self._read(stage, probe, before, outcome)
            size = self._learn(stage, probe, size, limits)
        finally:
            # In this order: what is written back lets go of what the trial made.
            for one in self._stages(stage):
                forget_loaders(loop_of(self.trainer, one))
            self._snapshot.restore()
            self._empty()
        return Trial(
            stage=stage,
            size=size,
            readings=outcome.agree(reading, self._gather),
            seconds=time.perf_counter() - begin,
            accumulate=self._accumulate_for(size) if stage == "train" else 1,
        )

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def _stages(self, stage: Stage) -> list[Stage]:
        """Whose loops a trial runs."""
        if not self._is_fitting:
            return [stage]
        return ["train", "val"] if self._validates else ["train"]

    def _prepare(self, stage: Stage, size: int) -> None:
        """Everything set here is put back by the memento."""
        trainer = self.trainer
        self._sizes[stage] = size
        self._set_accumulation()
        own = [callback for callback in trainer.callbacks if takes_part(callback)]  # type: ignore[attr-defined]
        trainer.callbacks = own  # type: ignore[attr-defined]
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
        # A scheduler takes no memory, and may ask for metrics that are not there yet. In manual optimization the
        # user's code steps them.
        if trainer.lightning_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []
        for hook in self._hooks:
            hook()

    def _set_accumulation(self) -> None:
        """Within fit, write the training size and go by its accumulation; two micro-batches take what more take."""
        if not self._is_fitting:
            return
        size = self._sizes.get("train")
        if size is not None:
            self._places.write("train", size)
        n = self.trainer.accumulate_grad_batches if size is None else self._accumulate_for(size)
        self.trainer.accumulate_grad_batches = min(n, 2)

    def _set_up_data(self, stage: Stage, size: int, limits: Limits) -> int:
        """Make the loaders, on all ranks at once; again with a smaller size if there are fewer samples."""
        admitted = size
        for _ in range(2):
            self._sizes[stage] = admitted
            self._set_accumulation()
            for one in self._stages(stage):
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
        # Advice on the sizes of a trial is of no use to anybody, and whatever holds for the fit as well is said there.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # So that it does not ask for the validation loader or complain of a check interval.
            limit, interval = trainer.limit_val_batches, trainer.val_check_interval
            if stage == "train":
                trainer.limit_val_batches, trainer.val_check_interval = 0, 1.0
            loop.setup_data()
            trainer.limit_val_batches, trainer.val_check_interval = limit, interval

    def _switch(self, stage: Stage) -> None:
        name = {"train": "training", "val": "validating", "test": "testing", "predict": "predicting"}[stage]
        setattr(self.trainer, name, True)

    def _run_loops(self, stage: Stage, probe: Probe) -> Outcome:
        """Run until the probe has seen enough."""
        trainer = self.trainer
        trainer.callbacks = [*trainer.callbacks, Room(self._reader, None, {}), probe]  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            without_collectives(trainer)
        probe.enter("train" if self._is_fitting else stage)
        try:
            # What callbacks say of a trial is of no use to anybody, as of the sizes.
            with no_collectives(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                if self._is_fitting:
                    self._run_fit()
                else:
                    probe.eval_batches = batches_in_evaluation(loop_of(trainer, stage))
                    loop_of(trainer, stage).run()
        except TrialOver as over:
            traceback.clear_frames(over.__traceback__)
        except BaseException as error:  # noqa: BLE001, it is judged, and raised again on all ranks if it is the user's
            for one in error_chain(error):
                traceback.clear_frames(one.__traceback__)
            where = "" if probe.stage == stage else _IN[probe.stage]
            if not isinstance(error, CollectiveInTrial) and is_out_of_memory(error):
                return Outcome("out of memory", where)
            if is_killed_worker(error):
                return Outcome("a data-loader worker was killed", where)
            return Outcome("an error of another kind", where, error)
        return Outcome()

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

    def _read(self, stage: Stage, probe: Probe, before: MemoryStats | None, outcome: Outcome) -> Reading:
        """What this rank's device showed. Completes the outcome with what is no error."""
        window = probe.whole.get(stage)
        if self._reader is None or before is None or window is None or probe.batch is None:
            return Reading()
        stats = self._reader.stats()
        others = max((stats.device_used or 0) - (stats.reserved or 0), 0)
        limit = None if stats.capacity is None else limit_of(stats.capacity, self._margin)
        if not outcome.failure and (stats.ooms or 0) > (before.ooms or 0):
            outcome.failure = "out of memory"  # somebody's code caught it and went on
        if not outcome.failure and (stats.alloc_retries or 0) > (before.alloc_retries or 0):
            outcome.failure = "allocation retry"
        for other, theirs in probe.whole.items():
            over = limit is not None and theirs.reserved is not None and theirs.reserved + others > limit
            if other != stage and over and not outcome.failure:
                outcome.failure, outcome.where = (
                    "over the limit",
                    _IN[other],
                )
        return Reading(
            peak=None if window.reserved is None else window.reserved + others,
            limit=limit,
            peak_allocated=window.allocated,
            batch_allocated=probe.batch.allocated if stage == "train" else window.allocated,
            base_allocated=probe.base_allocated.get(stage),
        )

    def _learn(self, stage: Stage, probe: Probe, size: int, limits: Limits) -> int:
        """Take over what the batches told; returns the size that they really had."""
        loaders = prepared_loaders(loop_of(self.trainer, stage))
        per_sample = probe.batch_bytes.get(stage, 0) / size
        limits.shm = samples_in_shared_memory(per_sample, [one for one in loaders if isinstance(one, DataLoader)])
        only_streams = loaders and all(isinstance(getattr(one, "dataset", None), IterableDataset) for one in loaders)
        observed = probe.observed_size.get(stage)
        if only_streams and observed is not None and observed < size:
            limits.n_samples = observed  # the stream has no more than that
            return observed
        return size

    def _empty(self) -> None:
        let_go_of_failed_backward()
        gc.collect()
        if self._reader is not None:
            self._reader.empty_cache()
            peak_counter(self._reader).forget()


def limit_of(capacity: int, margin: float) -> int:
    """What may be taken of a device, in bytes; a margin is a share (float) or bytes (int)."""
    return capacity - margin if isinstance(margin, int) else int(capacity * (1 - margin))
