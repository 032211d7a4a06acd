"""BatchSizeTuner: the largest batch that really fits, found in a few trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console

from lightning_memtools.batchsize.limits import Limits, normalizes_batches, samples_per_rank
from lightning_memtools.batchsize.loaders import WorstCase
from lightning_memtools.batchsize.memento import Memento, RandomState
from lightning_memtools.batchsize.result import BatchSizeResult, nothing_fits
from lightning_memtools.batchsize.search import best, find_largest
from lightning_memtools.batchsize.trials import Trial
from lightning_memtools.callbacks._batch_size_cache import SizeCache
from lightning_memtools.callbacks._collectives import why_refused
from lightning_memtools.callbacks._sized import Places, unwrap_sources, wrap_sources
from lightning_memtools.callbacks._trial import TrialRunner, takes_part
from lightning_memtools.callbacks._virtual import CarriedDevice, put_on_device
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.stages import STAGES, Stage
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.reporting._lightning import (
    end_the_call,
    forget_loaders,
    loop_of,
    prepared_loaders,
    source_of,
    training_step,
)
from lightning_memtools.reporting.files import report_directory, write_report
from lightning_memtools.reporting.loggers import log_text


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
        self._before_building: Memento | None = None
        self._random_after: RandomState | None = None
        self._carried = CarriedDevice()

    # --- when it acts

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the random numbers that optimizers are built with, to build them again with the same."""
        self._undo(trainer)
        self._carried.enter()
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        build = strategy.setup_optimizers

        def build_and_note(*args: Any, **kwargs: Any) -> None:
            strategy.__dict__.pop("setup_optimizers", None)
            self._before_building = Memento(_passed_loaders(trainer))
            build(*args, **kwargs)
            self._random_after = RandomState()

        strategy.setup_optimizers = build_and_note

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the sizes, or use those of the checkpoint that is resumed from."""
        put_on_device(trainer, pl_module)
        stages = [stage for stage in ("train", "val") if stage in self.stages]
        if not stages or not self._can_start(trainer):
            self._leave_early()
            return
        if self._found:
            self._resume(trainer)
        else:
            mine = trainer.callbacks.index(self)  # type: ignore[attr-defined]
            later = [callback for callback in trainer.callbacks[mine + 1 :] if takes_part(callback)]  # type: ignore[attr-defined]
            hooks: list[Callable[[], None]] = [
                *(lambda c=callback: c.on_fit_start(trainer, pl_module) for callback in later),
                pl_module.on_fit_start,
            ]
            self._search(trainer, stages, hooks, rebuild=True)
        self._leave_early()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search again in the epochs that were asked for."""
        epoch = trainer.current_epoch
        if epoch == 0 or epoch not in self.at_epochs or not self._can_start(trainer):
            return
        stages = [stage for stage in ("train", "val") if stage in self.stages]
        self._search(trainer, stages, [], rebuild=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.validate`."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._search_evaluation(trainer, pl_module, "val")

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
            if self._before_building is not None:
                self._before_building.restore()
            raise end_the_call()

    def _search_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        """Search from within the loop's own start, then have it begin with the loaders of the new size."""
        put_on_device(trainer, pl_module)
        if stage not in self.stages or not self._can_start(trainer):
            return
        loop = loop_of(trainer, stage)
        if stage in self._found:
            self._sizes[stage] = self._found[stage]
            wrap_sources(trainer, [stage], self._places(trainer), self._sizes.get)
        else:
            self._search(trainer, [stage], [], rebuild=False)
        with_numbers = RandomState()
        forget_loaders(loop)
        loop.setup_data()
        loop.reset()
        with_numbers.restore()

    def _places(self, trainer: Trainer) -> Places:
        names = [self.batch_arg_name] if isinstance(self.batch_arg_name, str) else list(self.batch_arg_name)
        return Places(trainer, names)

    def _search(  # noqa: PLR0915, a straight list of what is done
        self, trainer: Trainer, stages: Sequence[str], hooks: Sequence[Callable[[], None]], *, rebuild: bool
    ) -> None:
        begin = time.perf_counter()
        reader = reader_for(trainer.strategy.root_device)
        places = self._places(trainer)
        wanted: list[Stage] = [stage for stage in STAGES if stage in stages and _has_data(trainer, stage)]
        if any(source_of(loop_of(trainer, stage)).is_module() for stage in wanted):
            places.check()
        before = self._as_it_is(trainer, places)
        fitting: list[Stage] = ["train", "val"] if trainer.state.fn == TrainerFn.FITTING else wanted
        self._sizes = {stage: before.get(stage) for stage in fitting}
        sources = wrap_sources(trainer, fitting, places, self._sizes.get)
        learning_rates = _learning_rates(trainer)
        per_rank = None
        if self.effective_batch_size is not None:
            per_rank = samples_per_rank(self.effective_batch_size, trainer.world_size)
        original_accumulate = trainer.accumulate_grad_batches

        def accumulate_for(size: int) -> int:
            return original_accumulate if per_rank is None else max(per_rank // size, 1)

        directory = report_directory(trainer)
        trials: list[Trial] = []
        notes: list[str] = []
        found: dict[Stage, Trial] = {}
        with TemporaryDirectory(prefix="memtools-") as root:
            runner = TrialRunner(
                trainer, reader=reader, places=places, sources=sources, sizes=self._sizes, margin=self._margin,
                accumulate_for=accumulate_for, hooks=hooks, worst_case=self.worst_case, root=root, owner=type(self),
            )  # fmt: skip
            cache = SizeCache.of(self.cache, trainer, reader, self._facts(wanted), self._names())
            known = cache.load()
            with runner:
                for stage in wanted:
                    limits = self._limits(trainer, stage, per_rank)
                    mine = self._verify(runner, stage, limits, known.get(stage))
                    if best(mine) is None:
                        mine += self._run_trials(runner, stage, limits, reader, self.max_trials - len(mine))
                    trials += mine
                    chosen = best(mine)
                    if chosen is None:
                        self._sizes[stage] = before.get(stage)
                        unwrap_sources(trainer)
                        raise RuntimeError(nothing_fits(stage, mine))
                    found[stage] = chosen
                    self._sizes[stage] = chosen.size
                    _check_it_follows(mine, runner, places, stage)
                    cut = sorted(limits.cut - {"max_val"})
                    if limits.round_down(chosen.size + self.multiple_of) <= chosen.size and cut:
                        notes.append(f"The size for {stage} is held down by {' and '.join(cut)}.")
        self._found = {stage: trial.size for stage, trial in found.items()}
        if "train" in found and per_rank is not None:
            self._accumulate = accumulate_for(found["train"].size)
        self._apply(trainer, places, wanted, rebuild=rebuild)
        cache.store(self._found)
        notes += self._on_the_learning_rate(trainer, before, learning_rates)
        if not rebuild and "train" in found and trainer.lr_scheduler_configs:
            notes.append("Learning-rate schedulers go on as they were built, for the number of steps of the old size.")
        self.result = BatchSizeResult(
            sizes={str(stage): size for stage, size in self._found.items()},
            trials=tuple(trials),
            peaks={stage: trial.tightest.peak for stage, trial in found.items()},
            accumulate=trainer.accumulate_grad_batches,
            seconds=time.perf_counter() - begin,
            device="" if reader is None else f"On {reader.name}.",
            n_ranks=trainer.world_size,
            notes=tuple(notes),
        )
        self._report(trainer, self.result, directory)

    def _limits(self, trainer: Trainer, stage: Stage, per_rank: int | None) -> Limits:
        min_batches = 1.0
        if stage == "train":
            share, interval = trainer.limit_train_batches, trainer.val_check_interval
            if isinstance(share, float) and 0 < share < 1:
                min_batches = 1 / share
            if type(interval) is int and trainer.check_val_every_n_epoch is not None:
                min_batches = max(min_batches, interval)
        elif isinstance(share := getattr(trainer, f"limit_{stage}_batches"), float) and 0 < share < 1:
            min_batches = 1 / share
        return Limits(
            max_val=self.max_val,
            multiple_of=self.multiple_of,
            per_rank=per_rank if stage == "train" else None,
            min_batches=min_batches,
            avoid_single=stage == "train" and normalizes_batches(trainer.lightning_module),
        )

    def _verify(self, runner: TrialRunner, stage: Stage, limits: Limits, size: int | None) -> list[Trial]:
        """A size from the cache takes one trial; none if there is no such size."""
        return [] if size is None else [runner.run(stage, size, limits)]

    def _run_trials(
        self, runner: TrialRunner, stage: Stage, limits: Limits, reader: MemoryReader | None, max_trials: int
    ) -> list[Trial]:
        trials: list[Trial] = []

        def run(size: int) -> Trial:
            trial = runner.run(stage, size, limits)
            trials.append(trial)
            unlimited = all(reading.limit is None for reading in trial.readings)
            if unlimited and reader is not None and limits.max_val is None and limits.n_samples is None:
                raise ValueError(
                    f"Nothing limits the batch size: {reader.name} has no capacity, the data set no length, and "
                    "max_val is None. Set max_val."
                )
            return trial

        find_largest(
            run, start=self.init_val, round_down=limits.round_down, smallest=limits.smallest,
            max_trials=max(max_trials, 1),
        )  # fmt: skip
        return trials

    def _as_it_is(self, trainer: Trainer, places: Places) -> dict[Stage, int]:
        """The sizes before the search, as attributes or as what passed loaders have."""
        found: dict[Stage, int] = {}
        for stage in STAGES:
            source = source_of(loop_of(trainer, stage))
            size = places.read(stage)
            if source.is_module():
                if size is not None:
                    found[stage] = size
            elif stage in self._found:
                found[stage] = self._found[stage]
        return found

    def _apply(self, trainer: Trainer, places: Places, stages: Sequence[Stage], *, rebuild: bool) -> None:
        """Write the sizes, and have loaders (and schedulers) made for them."""
        attribute = self._found.get("train") or (next(iter(self._found.values())) if "train" not in stages else None)
        for stage in stages:
            own = any(name.startswith(f"{stage}_") for name in places.names_for(stage))
            if stage == "train" or own or len(stages) == 1:
                places.write(stage, self._found[stage] if own else attribute or self._found[stage],
                             for_loggers=True)  # fmt: skip
        if "train" not in stages and trainer.state.fn != TrainerFn.FITTING:
            return
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate
        loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
        had_loaders = [bool(prepared_loaders(loop)) for loop in loops]
        for loop in loops:
            forget_loaders(loop)
        if rebuild:
            self._build_optimizers_again(trainer)
            put_on_device(trainer, trainer.lightning_module)
            return
        numbers = RandomState()
        if had_loaders[0]:
            trainer.fit_loop.setup_data()
            for loader in prepared_loaders(trainer.fit_loop):
                _set_epoch(loader, trainer.current_epoch)
        numbers.restore()

    def _build_optimizers_again(self, trainer: Trainer) -> None:
        """As if the model had had the new size from the beginning, with the same random numbers."""
        now = RandomState()
        undisturbed = self._random_after is not None and now == self._random_after
        if self._before_building is not None:
            self._before_building.restore()  # the loaders' own generators too
        trainer.strategy.setup_optimizers(trainer)
        trainer.strategy.setup_precision_plugin()
        if not undisturbed:
            now.restore()  # somebody drew numbers since, and would do so again after these

    def _resume(self, trainer: Trainer) -> None:
        """Use what was found before, in this run or in the one that is resumed."""
        places = self._places(trainer)
        self._sizes = {**self._as_it_is(trainer, places), **self._found}
        stages: list[Stage] = [stage for stage in ("train", "val") if stage in self._found]
        wrap_sources(trainer, ["train", "val"], places, self._sizes.get)
        self._apply(trainer, places, stages, rebuild=True)
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

    def _facts(self, stages: Sequence[Stage]) -> dict[str, Any]:
        return {"margin": self.margin, "max_val": self.max_val, "multiple_of": self.multiple_of,
                "effective_batch_size": self.effective_batch_size, "stages": list(stages)}  # fmt: skip

    def _names(self) -> list[str]:
        return [self.batch_arg_name] if isinstance(self.batch_arg_name, str) else list(self.batch_arg_name)

    def _report(self, trainer: Trainer, result: BatchSizeResult, directory: Path | None) -> None:
        if not trainer.is_global_zero:
            return
        write_report(directory, "batch_size.md", result.markdown())
        log_text(trainer, "memtools/batch_size", result.markdown(), training_step(trainer))
        console = Console()
        console.print(f"BatchSizeTuner: {result.summary()}", markup=False, highlight=False)
        for note in result.notes:
            console.print(f"  {note}", markup=False, highlight=False)

    def _undo(self, trainer: Trainer) -> None:
        unwrap_sources(trainer)
        trainer.strategy.__dict__.pop("setup_optimizers", None)
        self._before_building = self._random_after = None


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


def _has_data(trainer: Trainer, stage: Stage) -> bool:
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    if stage == "val":
        return bool(trainer.enable_validation) if trainer.state.fn == TrainerFn.FITTING else True
    return bool(getattr(trainer, f"limit_{stage}_batches") != 0)


def _check_it_follows(trials: Sequence[Trial], runner: TrialRunner, places: Places, stage: Stage) -> None:
    """Raise if the loader gave the same batches whatever the attribute was."""
    seen = runner.loader_sizes.get(stage, {})
    if len(trials) > 1 and len(seen) > 1 and len(set(seen.values())) == 1:
        (size,) = set(seen.values())
        names = ", ".join(places.names_for(stage))
        raise ValueError(
            f"The {stage}_dataloader gives batches of {size} whatever {names} is (tried {sorted(seen)}). Let the hook "
            f"read it, as in DataLoader(..., batch_size=self.{places.names_for(stage)[0]})."
        )


def _passed_loaders(trainer: Trainer) -> list[Any]:
    sources = [source_of(loop_of(trainer, stage)) for stage in ("train", "val")]
    return [source.instance for source in sources if not source.is_module()]


def _learning_rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _set_epoch(loader: Any, epoch: int) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        Console().print(f"BatchSizeTuner: {text}", markup=False, highlight=False)
