"""BatchSizeTuner: the largest batch that really fits, found in a few trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console

from lightning_memtools._lightning import end_the_call, forget_loaders, loop_of, training_step
from lightning_memtools.batch_size.loaders import WorstCase
from lightning_memtools.batch_size.result import BatchSizeResult
from lightning_memtools.batch_size.trainer.applying import forget_fit_loaders, renew_fit_loaders, write_sizes
from lightning_memtools.batch_size.trainer.building import Building
from lightning_memtools.batch_size.trainer.collectives import why_refused
from lightning_memtools.batch_size.trainer.places import Places
from lightning_memtools.batch_size.trainer.presence import left_out_of_counts, takes_part
from lightning_memtools.batch_size.trainer.room import Room
from lightning_memtools.batch_size.trainer.runner import limit_of
from lightning_memtools.batch_size.trainer.schedulers import renew_schedulers
from lightning_memtools.batch_size.trainer.sources import unwrap_sources, wrap_sources
from lightning_memtools.batch_size.trainer.tuning import Settings, Tuning, device_in_words, has_data, sizes_before
from lightning_memtools.callbacks._virtual import CarriedDevice, put_on_device
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.stages import STAGES, Stage
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.state.random_state import RandomState


class BatchSizeTuner(Callback):
    """Finds the largest batch size that really fits, before training begins.

    It measures the peak at two sizes, predicts the size that just fits, runs it, and corrects from what it measured:
    only sizes that were run are used. A trial is two optimizer steps (or two evaluation batches) in the Trainer's own
    loops, with the callbacks that take part in training; afterwards weights, optimizer, random numbers, loops, data
    loaders and attributes are as before, bit for bit. Schedulers are built for the new size.

    On a device without memory statistics (a CPU outside of a VirtualDevice) the size is left as it is.

    Args:
        batch_arg_name: The attribute or hyperparameter of the model or the data module that the `*_dataloader` hooks
            read; or several. One that begins with a stage ("val_batch_size") is for that stage alone. DataLoaders
            passed to the Trainer need none: they are rebuilt with the new size.
        margin: What has to stay free of the device: a share of its capacity, or a size such as "1GiB".
        init_val: The first size that is tried.
        max_val: No larger size; None for no such limit.
        multiple_of: Only multiples of this.
        effective_batch_size: Samples per optimizer step over all ranks. The largest micro-batch that divides it and
            fits is chosen, and `accumulate_grad_batches` set so that micro-batch x accumulation x ranks is exactly
            this.
        stages: Whose sizes to find: train, val, test, predict. Within fit, val is found with training's memory there.
        max_trials: The most trials per stage.
        at_epochs: Training epochs at whose beginning to search again, after the one before training.
        cache: A JSON file that keeps sizes, by model, data, device, precision and versions. A size found there is
            verified with one trial.

    Raises:
        ValueError: An argument is out of its range.
    """

    worst_case: WorstCase | None = None
    """A function (data set, n) -> indices of the n samples that take the most memory; they are used in trials."""

    takes_part_in_trials = False
    """Trials leave this callback out, as any other that says so."""

    def __init__(
        self,
        *,
        batch_arg_name: str | Sequence[str] = "batch_size",
        margin: float | str = 0.05,
        init_val: int = 2,
        max_val: int | None = None,
        multiple_of: int = 1,
        effective_batch_size: int | None = None,
        stages: Sequence[str] = ("train", "val"),
        max_trials: int = 8,
        at_epochs: Sequence[int] = (),
        cache: str | None = None,
    ) -> None:
        for name, value in (("init_val", init_val), ("max_val", max_val), ("multiple_of", multiple_of),
                            ("effective_batch_size", effective_batch_size), ("max_trials", max_trials)):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} is below 1. Give a whole number from 1 on.")
        if max_val is not None and max_val < multiple_of:
            raise ValueError(f"max_val={max_val} is below multiple_of={multiple_of}: no size is left. Raise max_val.")
        unknown = sorted(set(stages) - set(get_args(Stage)))
        if unknown or not stages or isinstance(stages, str):
            raise ValueError(f"stages={stages!r} must be a sequence of some of {', '.join(STAGES)}.")
        self.batch_arg_name = batch_arg_name
        self.margin = margin
        self.init_val = init_val
        self.max_val = max_val
        self.multiple_of = multiple_of
        self.effective_batch_size = effective_batch_size
        self.stages = stages
        self.max_trials = max_trials
        self.at_epochs = at_epochs
        self.cache = cache
        self.result: BatchSizeResult | None = None
        self._margin = checked_margin(margin)
        self._sizes: dict[Stage, int | None] = {}
        self._found: dict[Stage, int] = {}
        self._accumulate: int | None = None
        self._stop_afterwards = False
        self._building = Building()
        self._room: Room | None = None
        self._carried = CarriedDevice()

    # --- when it acts

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the random numbers that optimizers are built with, to build them again with the same."""
        self._undo(trainer)
        self._carried.enter()
        if stage == "fit":
            self._building.watch(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the sizes, or use those of the checkpoint that is resumed from."""
        put_on_device(trainer, pl_module)
        stages = [stage for stage in ("train", "val") if stage in self.stages]
        if not stages or not self._can_start(trainer):
            self._leave_early()
            return
        if stages[0] in self._found:
            self._resume(trainer)
        else:
            mine = trainer.callbacks.index(self)  # type: ignore[attr-defined]
            later = [callback for callback in trainer.callbacks[mine + 1 :] if takes_part(callback)]  # type: ignore[attr-defined]
            hooks: list[Callable[[], None]] = [
                *(lambda c=callback: c.on_fit_start(trainer, pl_module) for callback in later),
                pl_module.on_fit_start,
            ]
            self._search(trainer, stages, hooks, begins=True)
        self._leave_early()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search again in the epochs that were asked for."""
        epoch = trainer.current_epoch
        if epoch == 0 or epoch not in self.at_epochs or not self._can_start(trainer):
            return
        stages = [stage for stage in ("train", "val") if stage in self.stages]
        self._search(trainer, stages)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """After a validation, make room for training."""
        if self._room is not None:
            self._room.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.validate`; within fit, make room for validation."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._search_evaluation(trainer, pl_module, "val")
        elif self._room is not None:
            self._room.on_validation_start(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.test`."""
        self._search_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.predict`."""
        self._search_evaluation(trainer, pl_module, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the loops ask for their loaders as before. Sizes stay as they were found."""
        self._undo(trainer)
        self._carried.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """As teardown."""
        self._undo(trainer)
        self._carried.leave()

    def state_dict(self) -> dict[str, Any]:
        """The sizes, for a run that is resumed."""
        return {"sizes": dict(self._found), "accumulate": self._accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the sizes of the run that is resumed, without a search."""
        self._found = dict(state_dict.get("sizes", {}))
        self._accumulate = state_dict.get("accumulate")

    # --- how it is done

    def _can_start(self, trainer: Trainer) -> bool:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            _say(trainer, "skipped, because fast_dev_run=True runs batches of the size as it is.")
            return False
        reason = why_refused(trainer, trainer.lightning_module)
        if reason is not None:
            raise RuntimeError(f"BatchSizeTuner cannot run trials here: {reason}, and remove BatchSizeTuner.")
        device = trainer.strategy.root_device
        if device.type == "cpu" and reader_for(device) is None:
            _say(trainer, "a CPU keeps no memory statistics, so the batch size stays as it is. Inside "
                 "`with VirtualDevice('24GiB'):` it is found for that device.")  # fmt: skip
            return False
        return True

    def _leave_early(self) -> None:
        if self._stop_afterwards:
            self._building.go_back()
            raise end_the_call()

    def _search_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        """Search from within the loop's own start, then have it begin with the loaders of the new size."""
        put_on_device(trainer, pl_module)
        if stage not in self.stages or not self._can_start(trainer):
            return
        loop = loop_of(trainer, stage)
        if stage in self._found:
            self._sizes[stage] = self._found[stage]
            wrap_sources(trainer, [stage], Places(trainer, self._names), self._sizes.get)
        else:
            self._search(trainer, [stage])
        with_numbers = RandomState.now()
        forget_loaders(loop)
        loop.setup_data()
        loop.reset()
        with_numbers.restore()

    def _search(
        self,
        trainer: Trainer,
        stages: Sequence[str],
        hooks: Sequence[Callable[[], None]] = (),
        *,
        begins: bool = False,
    ) -> None:
        """Search, write the sizes, and report. `begins` says that this is before a fit."""
        began_at = time.perf_counter()
        reader = reader_for(trainer.strategy.root_device)
        places = Places(trainer, self._names)
        wanted: list[Stage] = [stage for stage in STAGES if stage in stages and has_data(trainer, stage)]
        before = sizes_before(trainer, places, self._found)
        rates = _learning_rates(trainer)
        directory = report_directory(trainer)
        settings = Settings(
            names=self._names, margin=self._margin, init_val=self.init_val, max_val=self.max_val,
            multiple_of=self.multiple_of, effective_batch_size=self.effective_batch_size, max_trials=self.max_trials,
            cache=self.cache, worst_case=self.worst_case,
        )  # fmt: skip
        with left_out_of_counts(trainer, reader):
            tuned = Tuning(trainer, settings, sizes=self._sizes, before=before, owner=type(self)).run(
                wanted, hooks, begins=begins
            )
        self._found = {**self._found, **tuned.sizes}
        if tuned.accumulate is not None:
            self._accumulate = tuned.accumulate
        peaks = {stage: trial.readings[trainer.global_rank].peak for stage, trial in tuned.found.items()}
        self._apply(trainer, places, wanted, begins=begins)
        self._room = Room(reader, self._limit(reader), peaks)
        notes = [*tuned.notes, *self._on_the_learning_rate(trainer, before, rates)]
        if not begins and "train" in tuned.found and renew_schedulers(trainer):
            notes.append("The learning-rate schedule was built again for the new number of steps.")
        self.result = BatchSizeResult(
            sizes={str(stage): size for stage, size in tuned.sizes.items()},
            trials=tuned.trials,
            peaks={stage: trial.tightest.peak for stage, trial in tuned.found.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - began_at,
            device=device_in_words(reader),
            n_ranks=trainer.world_size,
            notes=tuple(notes),
        )
        self._report(trainer, self.result, directory)

    def _limit(self, reader: MemoryReader | None) -> int | None:
        capacity = None if reader is None else reader.stats().capacity
        return None if capacity is None else limit_of(capacity, self._margin)

    def _apply(self, trainer: Trainer, places: Places, stages: Sequence[Stage], *, begins: bool) -> None:
        """Write the sizes, and have loaders (and schedulers) made for them."""
        write_sizes(places, stages, self._found)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate
        if begins:
            forget_fit_loaders(trainer)
            self._building.repeat(trainer)
            put_on_device(trainer, trainer.lightning_module)
        else:
            renew_fit_loaders(trainer)

    def _resume(self, trainer: Trainer) -> None:
        """Use what was found before, in this run or in the one that is resumed."""
        places = Places(trainer, self._names)
        self._sizes = {**sizes_before(trainer, places, self._found), **self._found}
        stages: list[Stage] = [stage for stage in ("train", "val") if stage in self._found]
        wrap_sources(trainer, ["train", "val"], places, self._sizes.get)
        self._apply(trainer, places, stages, begins=True)
        reader = reader_for(trainer.strategy.root_device)
        self._room = Room(reader, self._limit(reader), {})
        sizes = ", ".join(f"{stage} {self._found[stage]}" for stage in stages)
        _say(trainer, f"using the sizes found before: {sizes}.")

    def _on_the_learning_rate(
        self, trainer: Trainer, before: Mapping[Stage, int], learning_rates: Sequence[float]
    ) -> list[str]:
        old, new = before.get("train"), self._found.get("train")
        if old is None or new is None or self.effective_batch_size is not None or old == new:
            return []
        if _learning_rates(trainer) != learning_rates:
            return []
        steps = trainer.accumulate_grad_batches * trainer.world_size
        rates = ", ".join(f"{rate:g}" for rate in sorted(set(learning_rates)))
        changed = f"The effective batch went from {old * steps} to {new * steps} samples"
        advice = f"effective_batch_size={old * steps} would keep the old one."
        return [f"{changed}; the learning rate is still {rates}. {advice}"]

    @property
    def _names(self) -> list[str]:
        return [self.batch_arg_name] if isinstance(self.batch_arg_name, str) else list(self.batch_arg_name)

    def _report(self, trainer: Trainer, result: BatchSizeResult, directory: Path | NotWritten) -> None:
        if not trainer.is_global_zero:
            return
        write_report_or_warn(directory, "batch_size.md", result.markdown())
        log_text(trainer, "memtools/batch_size", result.markdown(), training_step(trainer))
        console = Console()
        console.print(f"BatchSizeTuner: {result.summary()}", markup=False, highlight=False)
        for note in result.notes:
            console.print(f"  {note}", markup=False, highlight=False)

    def _undo(self, trainer: Trainer) -> None:
        unwrap_sources(trainer)
        self._building.forget(trainer)
        self._room = None


def tune_batch_size(
    trainer: Trainer,
    model: LightningModule,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    worst_case: WorstCase | None = None,
    **arguments: Any,
) -> BatchSizeResult:
    """Find the batch size without training; model, Trainer and data are ready for a fit afterwards.

    The sizes are written to the attributes that hold them, as BatchSizeTuner does. DataLoaders that are passed are not
    changed: make new ones with `result.sizes`.

    Args:
        trainer: What would train. Its callbacks take part in the trials.
        model: What would be trained.
        datamodule: As for `trainer.fit`.
        train_dataloaders: As for `trainer.fit`.
        val_dataloaders: As for `trainer.fit`.
        worst_case: A function (data set, n) -> indices of the n samples that take the most memory.
        **arguments: Those of BatchSizeTuner.

    Raises:
        RuntimeError: Not even the smallest size fits, or the device keeps no memory statistics.
    """
    tuner = BatchSizeTuner(**arguments)
    tuner.worst_case = worst_case
    tuner._stop_afterwards = True  # noqa: SLF001, it is this module's own
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    trainer.callbacks = [*callbacks, tuner]  # type: ignore[attr-defined]
    try:
        trainer.fit(model, train_dataloaders, val_dataloaders, datamodule=datamodule)
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
    if tuner.result is None:
        raise RuntimeError(
            "tune_batch_size found nothing: the device keeps no memory statistics, or fast_dev_run is on. Run it on an "
            "accelerator, or inside `with VirtualDevice('24GiB'):`."
        )
    return tuner.result


def checked_margin(margin: float | str) -> float | int:
    """The share of the capacity (a float), or the bytes (an int), that have to stay free.

    Raises:
        ValueError: A share outside [0, 1), or a text that is no size.
    """
    if isinstance(margin, str):
        return parse_size(margin)
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin!r} must be a share in [0, 1), or a size such as '1GiB'.")
    return float(margin)


def _learning_rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        Console().print(f"BatchSizeTuner: {text}", markup=False, highlight=False)
