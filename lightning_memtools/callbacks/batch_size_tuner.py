"""BatchSizeTuner: finds the largest batch that fits, in a few trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import end_the_call, training_step
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult
from lightning_memtools.batch_size.resized_loaders import WorstCase
from lightning_memtools.batch_size.size_limits import checked_margin
from lightning_memtools.batch_size.trainer.size_tuning import SizeTuning, restart_evaluation_loop
from lightning_memtools.batch_size.trainer.stage_search import TunerSettings
from lightning_memtools.batch_size.trainer.trial_isolation import takes_part, why_no_trials
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.carried_device import CarriedDevice, put_on_device
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text


class BatchSizeTuner(Callback):
    """Finds the largest batch that fits, before training begins.

    It measures the peak at two sizes, predicts the largest size that fits, runs it, and corrects the prediction with
    what it measured: only sizes that were run are used. A trial is two optimizer steps (or two evaluation batches) in
    the Trainer's own loops, with the callbacks that take part in training. After each trial weights, optimizer, random
    streams, loops, data loaders and attributes are restored bit for bit. Schedulers are built for the new size.

    On a device without memory statistics (a CPU outside of a VirtualDevice) the size is left as it is.

    | logged | where | when |
    | --- | --- | --- |
    | `memtools/batch_size` | text: the sizes and every trial, to each logger that takes text | after a search |
    | `<log_dir>/memtools/batch_size.md` | the same, as a file | after a search |
    | the batch size among the hyperparameters | loggers that take hyperparameters | when the fit logs them |

    Args:
        batch_arg_name: The attribute or hyperparameter of the model or the data module that the `*_dataloader` hooks
            read; or several. One that begins with a stage ("val_batch_size") is for that stage alone. DataLoaders
            passed to the Trainer need none: they are rebuilt with the new size.
        margin: The part of the device that stays free: a share of its capacity, or a size such as "1GiB".
        init_val: The first size that is tried.
        max_val: No larger size is tried; None for no such limit.
        multiple_of: Only multiples of this are tried.
        effective_batch_size: Samples per optimizer step over all ranks. The largest micro-batch that divides it and
            fits is chosen, and `accumulate_grad_batches` is set so that micro-batch x accumulation x ranks is exactly
            this.
        stages: The stages to tune: train, val, test, predict. Within fit, val is tuned beside training's memory.
        max_trials: The most trials per stage.
        at_epochs: Training epochs at whose beginning to search again, besides the search before training.
        cache: A JSON file that stores sizes, by model, data, device, precision and versions. A size found there is
            verified with one trial.

    Raises:
        ValueError: An argument is out of its range.
    """

    worst_case: WorstCase | None = None
    """A function (data set, n) -> indices of the n samples that take the most memory; trials use these samples."""

    takes_part_in_trials = False
    """Trials leave out every callback with this attribute."""

    ends_before_training = False
    """End the fit once the sizes are found, as `tune_batch_size` does."""

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
        self._tuning = SizeTuning()
        self._carried = CarriedDevice()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Observe the setup of optimizers, to repeat it with the same random numbers."""
        self._tuning.undo(trainer)
        self._carried.enter()
        if stage == "fit":
            self._tuning.optimizer_setup.observe(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the sizes, or use those of the run that is resumed."""
        put_on_device(trainer, pl_module)
        stages = self._stages_in_fit()
        if stages and self._can_start(trainer):
            if stages[0] in self._tuning.found:
                self._tuning.reuse(trainer, self._settings())
                sizes = ", ".join(f"{stage} {self._tuning.found[stage]}" for stage in self._tuning.found_in_fit())
                _say(trainer, f"using the sizes found before: {sizes}.")
            else:
                mine = trainer.callbacks.index(self)  # type: ignore[attr-defined]
                later = [callback for callback in trainer.callbacks[mine + 1 :] if takes_part(callback)]  # type: ignore[attr-defined]
                hooks: list[Callable[[], None]] = [
                    *(lambda c=callback: c.on_fit_start(trainer, pl_module) for callback in later),
                    pl_module.on_fit_start,
                ]
                self._search(trainer, stages, hooks, begins=True)
            put_on_device(trainer, pl_module)
        if self.ends_before_training:
            self._tuning.optimizer_setup.restore_random_streams()
            raise end_the_call()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search again in the epochs that were asked for."""
        if trainer.current_epoch > 0 and trainer.current_epoch in self.at_epochs and self._can_start(trainer):
            self._search(trainer, self._stages_in_fit())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """After a validation, release the cache for training where both would not fit beside each other."""
        if self._tuning.cache_releaser is not None:
            self._tuning.cache_releaser.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.validate`; within fit, release the cache for validation where it has to be."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._tune_evaluation(trainer, pl_module, "val")
        elif self._tuning.cache_releaser is not None:
            self._tuning.cache_releaser.on_validation_start(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.test`."""
        self._tune_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size of `trainer.predict`."""
        self._tune_evaluation(trainer, pl_module, "predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the loops request their loaders as before. The sizes stay as they were found."""
        self._tuning.undo(trainer)
        self._carried.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Do what teardown does."""
        self._tuning.undo(trainer)
        self._carried.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes, for a run that is resumed."""
        return {"sizes": dict(self._tuning.found), "accumulate": self._tuning.accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the sizes of the run that is resumed, without a search."""
        self._tuning.found = dict(state_dict.get("sizes", {}))
        self._tuning.accumulate = state_dict.get("accumulate")

    def _stages_in_fit(self) -> list[Stage]:
        return [stage for stage in STAGES if stage in self.stages and stage in {"train", "val"}]

    def _settings(self) -> TunerSettings:
        names = [self.batch_arg_name] if isinstance(self.batch_arg_name, str) else list(self.batch_arg_name)
        return TunerSettings(
            names=names, margin=self._margin, init_val=self.init_val, max_val=self.max_val,
            multiple_of=self.multiple_of, effective_batch_size=self.effective_batch_size, max_trials=self.max_trials,
            cache=self.cache, worst_case=self.worst_case, owner=type(self),
        )  # fmt: skip

    def _can_start(self, trainer: Trainer) -> bool:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            _say(trainer, "skipped, because fast_dev_run=True runs batches of the size as it is.")
            return False
        reason = why_no_trials(trainer, trainer.lightning_module)
        if reason is not None:
            raise RuntimeError(f"BatchSizeTuner cannot run trials here: {reason}, and remove BatchSizeTuner.")
        device = trainer.strategy.root_device
        if device.type == "cpu" and reader_for(device) is None:
            _say(trainer, "a CPU keeps no memory statistics, so the batch size stays as it is. Inside "
                 "`with VirtualDevice('24GiB'):` it is found for that device.")  # fmt: skip
            return False
        return True

    def _tune_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        put_on_device(trainer, pl_module)
        if stage not in self.stages or not self._can_start(trainer):
            return
        if stage in self._tuning.found:
            self._tuning.reuse_in_evaluation(trainer, self._settings(), stage)
        else:
            self._search(trainer, [stage])
        restart_evaluation_loop(trainer, stage)

    def _search(
        self,
        trainer: Trainer,
        stages: Sequence[Stage],
        hooks: Sequence[Callable[[], None]] = (),
        *,
        begins: bool = False,
    ) -> None:
        directory = report_directory(trainer)  # collective, so before the ranks differ
        self.result = self._tuning.search(trainer, self._settings(), stages, hooks, begins=begins)
        if not trainer.is_global_zero:
            return
        write_report_or_warn(directory, "batch_size.md", self.result.markdown())
        log_text(trainer, "memtools/batch_size", self.result.markdown(), training_step(trainer))
        _say(trainer, self.result.summary())
        for note in self.result.notes:
            print_on_console(f"  {note}")


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
    """Find the largest batch that fits without training; model, Trainer and data are ready for a fit afterwards.

    The sizes are written to the attributes that hold them, as BatchSizeTuner does. DataLoaders that are passed are not
    changed: make new ones with `result.sizes`.

    Args:
        trainer: The Trainer that would train. Its callbacks take part in the trials.
        model: The model that would be trained.
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
    tuner.ends_before_training = True
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


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print_on_console(f"BatchSizeTuner: {text}")
