"""BatchSizeTuner: finds the largest batch that fits, in a few trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback, callbacks_of, end_the_call
from lightning_memtools.batch_size.batch_size_result import BatchSizeResult
from lightning_memtools.batch_size.size_limits import TunerSettings
from lightning_memtools.batch_size.trainer.size_tuning import SizeTuning, is_learning_rate_finder
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.state.state_snapshot import StateSnapshot


class BatchSizeTuner(EitherCallback, Neighbour):
    """Finds the largest batch size that fits into memory, before training begins.

    It tries the configured size first; if this fits, the result is never smaller. From the peaks of two sizes it
    predicts the largest size that fits, tries that, and bisects. The size that it returns was always tried. A trial
    runs a few steps of every optimizer and two validation batches in the Trainer's own loops, on the largest samples,
    with all callbacks but those that only watch or save. After each trial, weights, optimizers, random generators,
    loops, data loaders and attributes are restored bit for bit. A LearningRateFinder always runs
    after the search, whatever the order of the callbacks.

    On a device without memory statistics, such as a CPU, the batch size is left as it is.

    | logged | where | when |
    | --- | --- | --- |
    | `memtools/batch_size` | text: the sizes and every trial, to each logger that takes text | after a search |
    | `<log_dir>/memtools/batch_size.md` | the same text, as a file | after a search |
    | the batch size among the hyperparameters | loggers that take hyperparameters | when the fit logs them |

    Args:
        batch_arg_name: The name of the attribute or hyperparameter of the model or the data module that the
            `*_dataloader` hooks read. DataLoaders passed to the Trainer need no name: they are rebuilt with the new
            size.
        margin: The device memory to leave free: a fraction of the capacity, or a size such as "1GiB".
        init_val: The first size to try; None for the configured one.
        max_val: The largest size to try; None for no limit.
        multiple_of: Only multiples of this number are tried.
        effective_batch_size: The number of samples per optimizer step over all ranks. The largest micro-batch that
            divides it and fits is chosen, and `accumulate_grad_batches` is set so that micro-batch x accumulation x
            ranks is exactly this number.
        stages: The stages to tune: "train", "val" or both. Validation is tuned while training still holds its memory.
        max_trials: The maximum number of trials per stage.

    Raises:
        ValueError: An argument is out of its range.
    """

    stages: Sequence[str]

    ends_before_training = False
    """True to end the fit once the sizes are found, as `tune_batch_size` does."""

    def __init__(
        self,
        *,
        batch_arg_name: str = "batch_size",
        margin: float | str = 0.05,
        init_val: int | None = None,
        max_val: int | None = None,
        multiple_of: int = 1,
        effective_batch_size: int | None = None,
        stages: Sequence[str] = ("train", "val"),
        max_trials: int = 10,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in {"self", "__class__"}}
        vars(self).update(given)
        self.result: BatchSizeResult | None = None
        self._reader: MemoryReader | None = None
        self._has_validated = False
        self._tuning = SizeTuning(TunerSettings(**given))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback before any LearningRateFinder, which then runs with the batch size that was found."""
        self._tuning.undo()
        callbacks = callbacks_of(trainer)
        finders = [index for index, callback in enumerate(callbacks) if is_learning_rate_finder(callback)]
        if finders and finders[0] < callbacks.index(self):
            others = [callback for callback in callbacks if callback is not self]
            trainer.callbacks = [*others[: finders[0]], self, *others[finders[0] :]]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search for the largest batch sizes, unless the checkpoint that the run resumes from already holds them."""
        put_on_device(pl_module, trainer.optimizers)
        self._reader = reader_for(trainer.strategy.root_device)
        callbacks = callbacks_of(trainer)
        self.result = self._tuning.begin_fit(trainer, callbacks[callbacks.index(self) + 1 :]) or self.result
        if self.ends_before_training:
            raise end_the_call()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Empty the allocator's cache when training resumes after validation. By now, the validation batch is freed."""
        if self._reader is not None and self._has_validated:
            self._reader.empty_cache()
        self._has_validated = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Empty the allocator's cache before validation, because blocks cached by training may be of no use to it."""
        if self._reader is not None:
            self._reader.empty_cache()
        self._has_validated = True

    def teardown(self, *_: Any, **__: Any) -> None:
        """Restore the DataLoaders passed to the Trainer. Attributes such as `batch_size` keep the new sizes."""
        self._tuning.undo()
        self._reader = None

    on_exception = teardown

    def state_dict(self) -> dict[str, Any]:
        """Return the batch sizes that were found, to save them in a checkpoint."""
        return {"sizes": dict(self._tuning.found), "accumulate": self._tuning.accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the batch sizes from a checkpoint, so that no search runs."""
        self._tuning.found = dict(state_dict.get("sizes", {}))
        self._tuning.accumulate = state_dict.get("accumulate")


def tune_batch_size(
    trainer: Trainer,
    model: LightningModule,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    **arguments: Any,
) -> BatchSizeResult:
    """Find the largest batch size that fits, without training. The model and the Trainer are then ready for a fit.

    The size is written to the attribute that `batch_arg_name` names. DataLoaders that are passed in are not changed:
    make new ones with the sizes in `result.sizes`.

    Args:
        trainer: The Trainer that would train. Its callbacks take part in the trials.
        model: The model that would be trained.
        datamodule: As for `trainer.fit`.
        train_dataloaders: As for `trainer.fit`.
        val_dataloaders: As for `trainer.fit`.
        **arguments: The arguments of BatchSizeTuner.

    Raises:
        RuntimeError: Not even the smallest size fits, or the device keeps no memory statistics.
    """
    tuner = BatchSizeTuner(**arguments)
    tuner.ends_before_training = True
    callbacks, streams = callbacks_of(trainer), StateSnapshot([train_dataloaders, val_dataloaders])
    trainer.callbacks = [*callbacks, tuner]  # type: ignore[attr-defined]
    try:
        trainer.fit(model, train_dataloaders, val_dataloaders, datamodule=datamodule)
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        streams.restore()
    if tuner.result is None:
        raise RuntimeError(
            "tune_batch_size found nothing: the device keeps no memory statistics, or fast_dev_run is on. Run it on "
            "an accelerator, inside `with VirtualDevice('24GiB'):`, or the script by `memtools dry-run --gpu 'T4'`."
        )
    return tuner.result
