"""Trainers in a dry run: cut to a few steps, kept away from the user's files, and observed."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_memtools.batch_size.resized_loaders import known_sizes, worst_first
from lightning_memtools.null_cuda.dry_run.run_observer import RunObserver

# How long `advise` lets an out-of-memory report try changes; of a processor's time.
_ADVICE_SECONDS = 120.0
# Their checkpoints are put together by all ranks, and one rank of a dry run has nobody to talk to.
_SHARDING = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


def cut_trainers_when_imported(observer: RunObserver) -> None:
    """Limit Trainers to a few steps, by patching Lightning as soon as the script imports it."""
    cut = functools.partial(_cut_trainer, observer)
    functions: dict[str, Callable[[ModuleType], None]] = {
        "lightning.fabric": observer.files.guard_fabric,
        "lightning_fabric": observer.files.guard_fabric,
        "lightning.pytorch": cut,
        "pytorch_lightning": cut,
    }
    sys.meta_path.insert(0, _WhenImported(functions))


class _WhenImported(importlib.abc.MetaPathFinder):
    """An import hook: once a module has been imported, it calls the function that is registered for this module."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._functions = dict(functions)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec whose loader also calls the function registered for the module; None if none is registered."""
        function = self._functions.pop(name, None)
        spec = None if function is None else importlib.util.find_spec(name)
        if function is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _cut_trainer(observer: RunObserver, lightning: ModuleType) -> None:
    """Patch the Trainer class so that Trainers run only a few steps and leave the user's files alone."""
    trainer_class = lightning.Trainer
    create, save = trainer_class.__init__, trainer_class.save_checkpoint

    @functools.wraps(create)
    def init(self: Any, *args: Any, **options: Any) -> None:
        is_of_report = type(self).__module__.startswith("lightning_memtools.")
        create(self, *args, **(options if is_of_report else _limited(observer, options, lightning)))

    @functools.wraps(save)
    def save_checkpoint(self: Any, filepath: Any, *args: Any, **options: Any) -> None:
        if type(self.strategy).__name__ in _SHARDING:
            observer.note("Checkpoints were not written: all ranks write those of a sharded model, and one was run.")
            return
        if not self.strategy.is_global_zero:  # whose checkpoint rank 0 writes, which is not run
            self.strategy.save_checkpoint = self.strategy.checkpoint_io.save_checkpoint
        save(self, observer.files.to_write(filepath), *args, **options)

    trainer_class.__init__, trainer_class.save_checkpoint = init, save_checkpoint
    for name in ("validate", "test", "predict"):
        setattr(trainer_class, name, _without_checkpoint(observer, getattr(trainer_class, name)))


def _without_checkpoint(observer: RunObserver, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an evaluation of a Trainer to load no checkpoint, which may not exist and whose values change no memory."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        given = signature.bind(self, *args, **options).arguments
        if given.get("ckpt_path") is not None or given.get("model") is None:
            observer.note("No checkpoint was loaded for an evaluation: the model was used as it was.")
            given |= {"ckpt_path": None, "model": given.get("model") or self.lightning_module}
        return method(**given)

    return call


def _limited(observer: RunObserver, options: dict[str, Any], lightning: ModuleType) -> dict[str, Any]:
    """Return a Trainer's arguments, changed for a dry run: few steps, another folder, additional callbacks."""
    from lightning_memtools import OOMReport  # noqa: PLC0415, for Lightning's users only

    spec, limited = observer.spec, dict(options)
    callbacks = limited.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    if not any(isinstance(one, OOMReport) for one in callbacks):
        callbacks.append(OOMReport(directory=str(Path(spec.directory) / "memtools")))
    for one in callbacks:
        if isinstance(one, OOMReport):
            if spec.advise:
                one.checks_seconds = _ADVICE_SECONDS
            observer.reporting.append(one)
    limited["callbacks"] = [*callbacks, _callback_for(observer, lightning)]
    limited["default_root_dir"] = spec.directory
    limited["logger"] = _loggers(limited.get("logger"), spec.directory, lightning)
    limited.setdefault("enable_progress_bar", False)
    limited.setdefault("enable_model_summary", False)
    if spec.steps is None or limited.get("fast_dev_run"):
        return limited
    limited |= {"min_epochs": None, "min_steps": None, "max_time": None, "check_val_every_n_epoch": 1}
    if isinstance(limited.get("val_check_interval"), int):
        limited["val_check_interval"] = 1.0
    for stage in ("train", "val", "test", "predict"):
        most = spec.steps * (max(1, int(limited.get("accumulate_grad_batches") or 1)) if stage == "train" else 1)
        given = limited.get(f"limit_{stage}_batches")
        limited[f"limit_{stage}_batches"] = min(most, given) if isinstance(given, int) else 0 if given == 0 else most
    observer.note(
        f"Each training run was cut to {spec.steps} optimizer steps of one epoch, each evaluation run to "
        f"{spec.steps} batches (--steps)."
    )
    return limited


def _loggers(given: Any, directory: str, lightning: ModuleType) -> Any:
    """Redirect TensorBoard and CSV loggers to the dry run's folder, and replace all others with dummy loggers."""
    if given is None or isinstance(given, bool):
        return given
    loggers = lightning.loggers

    def redirected(logger: Any) -> Any:
        for kind in (loggers.TensorBoardLogger, loggers.CSVLogger):
            if isinstance(logger, kind):  # a subclass may have other arguments, so it is not made again
                kind.__init__(logger, save_dir=directory, name=logger.name, version=logger.version)
                return logger
        return loggers.logger.DummyLogger()

    return [redirected(one) for one in given] if isinstance(given, (list, tuple)) else redirected(given)


class _LargestLast:
    """A training loader cut to a few batches. The last one is the largest that the whole loader can yield."""

    def __init__(self, loader: Any, largest: Any, length: int) -> None:
        self._loader, self._largest, self._length = loader, largest, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self._loader, self._length - 1)
        yield next(iter(self._largest))


def _with_largest(observer: RunObserver, trainer: Any, loader: Any) -> Any:
    """Cut a loader so that the largest batch is last. Leave it as it is if sizes are unknown or all batches run."""
    sizes, length = known_sizes(loader), trainer.num_training_batches
    if sizes is None or length >= len(loader):
        return loader
    observer.note(f"The last training batch is the largest that the loader can give: {sizes.described()}.")
    return _LargestLast(loader, worst_first(loader, sizes), length)


def _callback_for(observer: RunObserver, lightning: ModuleType) -> Any:
    """Return a callback that tells the observer when stages of a Trainer begin and end."""

    class DryRunObserver(lightning.Callback):  # type: ignore[name-defined, misc]
        takes_part_in_trials = False  # of BatchSizeTuner: only the run itself is shown

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            for one in trainer.checkpoint_callbacks:
                one.dirpath = str(Path(observer.spec.directory) / "checkpoints")
            observer.begin()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            from lightning_memtools._lightning import replace_loaders  # noqa: PLC0415, only after the script

            if observer.spec.steps is not None:
                replace_loaders(trainer.fit_loop, lambda loader: _with_largest(observer, trainer, loader))
            observer.enter("train")
            observer.label_modules(pl_module)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            observer.phase("forward")
            observer.see(pl_module, trainer.optimizers, batch)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            observer.phase("backward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            observer.phase("optimizer")
            observer.see(pl_module, trainer.optimizers, None)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            observer.phase(None)
            observer.see(pl_module, trainer.optimizers, batch)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            # max_epochs stays the user's: a checkpoint may be of a later epoch. The epoch of one that was written
            # within an epoch may be over at once.
            if observer.spec.steps is not None and observer.n_steps:
                trainer.should_stop = True

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            observer.leave("train")

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            observer.enter(trainer.state.stage.dataloader_prefix)

        def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
            observer.see(pl_module, trainer.optimizers, batch)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            observer.leave(trainer.state.stage.dataloader_prefix)

        on_test_start = on_predict_start = on_validation_start
        on_test_batch_start = on_predict_batch_start = on_validation_batch_start
        on_test_end = on_predict_end = on_validation_end

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            observer.end()

    return DryRunObserver()
