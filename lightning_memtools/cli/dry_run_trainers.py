"""Trainers in a dry run: cut to a few steps, kept away from the user's files, and observed."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_memtools.batch_size.resized_loaders import known_sizes, worst_first
from lightning_memtools.cli.dry_run import DryRunSpec, DryRunStage
from lightning_memtools.cli.dry_run_files import RunFiles
from lightning_memtools.memory.history_owners import OwnerNotes
from lightning_memtools.memory.loader_sizes import n_samples_of
from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.memory.peaks import PeakCounter, Phase, PhaseWatch, Stage, StageWatch, peak_counter
from lightning_memtools.memory.readers import accelerator_reader, allocated_bytes
from lightning_memtools.memory.step_snapshot import ModuleLabels
from lightning_memtools.memory.virtual.patches import Patches
from lightning_memtools.simulation.known_values import FollowedValues, KnownValues, values_known

WHOLE_SCRIPT = "script"
# Their checkpoints are put together by all ranks, and one rank of a dry run has nobody to talk to.
_SHARDING = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


class RunObserver:
    """Collects the peaks of each stage, what a training step holds, and what each layer keeps.

    It is asked by a callback of each Trainer, made by `callback_for`; it knows no Lightning itself.
    """

    def __init__(self, spec: DryRunSpec) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self.files = RunFiles(Path(spec.directory), self.note)
        self.stages: dict[str, DryRunStage] = {}
        self._layers: dict[str, int] = {}
        self._layers_at_first: dict[str, int] = {}
        self._batches = 0
        self._watch: StageWatch | None = None
        self._phases: PhaseWatch | None = None
        self._counter: PeakCounter | None = None
        # The peaks of the whole script, before the last reset.
        self.script_peaks = {"allocated_bytes": 0, "reserved_bytes": 0}
        self.owners = OwnerNotes()
        self._hooks: list[Any] = []
        self._labels: list[ModuleLabels] = []
        self._open: list[tuple[str, int]] = []
        self.reporting: list[Any] = []

    def note(self, text: str) -> None:
        """Add a sentence to the result's notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def advice(self) -> Sequence[Any]:
        """Return the actions of the out-of-memory report of the last Trainer; none where it made no report."""
        return next((one.advice for one in self.reporting if one.advice), ())

    def begin(self, device: torch.device) -> None:
        """Begin a call of a Trainer."""
        reader = accelerator_reader(device) if device.type == "cuda" else None
        if reader is None:
            self.note(
                f"The Trainer used {device}, not a CUDA device: set accelerator='auto' or 'gpu' to see a GPU's memory."
            )
            return
        self._counter = counter = peak_counter(reader)
        self._watch = StageWatch(counter)
        self._phases = PhaseWatch(counter)

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        if self._watch is not None:
            self._watch.enter(stage)
            self.owners.enter(stage)

    def leave(self, stage: Stage) -> None:
        """End a stage."""
        if self._watch is not None and self._watch.running == stage:
            self._watch.point(stage)
            self._watch.leave(stage)
            self.owners.enter(self._watch.running)

    def phase(self, phase: Phase | None) -> None:
        """Begin a phase of a training step; None after the last."""
        if self._phases is not None:
            self._phases.switch(phase)
        for labels in self._labels:
            labels.enter_phase(phase or "")

    def see(self, model: nn.Module, optimizers: Sequence[Any], batch: Any) -> None:
        """Note which blocks model, optimizers and batch own; the batch is on the device."""
        running = self._watch.running if self._watch is not None else WHOLE_SCRIPT
        self.owners.note(running, model, optimizers, batch)

    def take_in_peaks(self) -> None:
        """Add the device's peaks to those known so far: the script may reset them."""
        if self._counter is not None:
            self._counter.fold()
        stats = torch.cuda.memory_stats(self.spec.rank)
        self.script_peaks = {
            name: max(stats.get(f"{name}.all.peak", 0), known) for name, known in self.script_peaks.items()
        }

    @property
    def layers(self) -> dict[str, int]:
        """The bytes that each layer keeps, at most.

        A first step counts only where no other follows: the workspaces of cuBLAS are made in it, within some layer.
        """
        return self._layers_at_first | self._layers

    @property
    def is_watching(self) -> bool:
        """True while a Trainer runs."""
        return self._watch is not None

    def begin_batch(self, model: nn.Module) -> None:
        """Begin a training batch of a Trainer."""
        self._batches += 1
        if self._batches == 2:  # noqa: PLR2004, the first has ended
            self._layers_at_first, self._layers = self._layers, {}
        if not self._hooks:
            self.watch_layers(model)

    def watch_layers(self, model: nn.Module) -> None:
        """Start to measure how many bytes each innermost module leaves allocated, and label requests with modules."""
        self._labels.append(labels := ModuleLabels(model))
        if self.is_watching:
            labels.enter_phase("forward")
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                shown = plain_name(f"{name}.").removesuffix(".") or type(model).__name__
                self._hooks += [
                    module.register_forward_pre_hook(functools.partial(self._enter_layer, shown)),
                    module.register_forward_hook(self._leave_layer),
                ]

    def _allocated(self) -> int:
        reader = accelerator_reader(torch.device("cuda", self.spec.rank))
        return 0 if reader is None else allocated_bytes(reader)

    def _enter_layer(self, name: str, module: nn.Module, _args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._open.append((name, self._allocated()))

    def _leave_layer(self, module: nn.Module, _args: Any, _out: Any) -> None:
        if self._open and module.training and torch.is_grad_enabled():
            name, before = self._open.pop()
            kept = self._allocated() - before
            self._layers[name] = max(kept, self._layers.get(name, 0))

    def end(self) -> None:
        """End a call of a Trainer. Idempotent."""
        for hook in (*self._hooks, *self._labels):
            hook.remove()
        self._hooks.clear()
        self._labels.clear()
        if self._watch is None:
            return
        phases = self._phases.point() if self._phases is not None else {}
        self._watch.close()
        for stage, peak in self._watch.peaks.items():
            if peak.allocated is None:
                continue
            before = self.stages.get(stage)
            if before is not None and before.peak_allocated >= peak.allocated:
                continue
            self.stages[stage] = DryRunStage(
                stage=stage,
                peak_allocated=peak.allocated,
                peak_reserved=peak.reserved or 0,
                phase=max(phases, key=lambda one: phases[one]) if stage == "train" and phases else None,
            )
        if self._phases is not None:
            self._phases.close()
        self._watch = self._phases = self._counter = None
        self.owners.enter(None)


def _callback_for(observer: RunObserver, lightning: ModuleType) -> Any:
    """Return the callback that passes a Trainer's stages to the observer; `lightning` is the package in use."""
    place = Path(observer.spec.directory)

    class DryRunObserver(lightning.Callback):  # type: ignore[name-defined, misc]
        takes_part_in_trials = False  # of BatchSizeTuner: only the run itself is shown

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            for one in trainer.checkpoint_callbacks:
                one.dirpath = str(place / "checkpoints")
            observer.begin(trainer.strategy.root_device)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.has_trained = False
            from lightning_memtools._lightning import replace_loaders  # noqa: PLC0415, only after the script

            if observer.spec.steps is not None:
                replace_loaders(trainer.fit_loop, lambda loader: _with_largest(observer, trainer, loader))
            observer.enter("train")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            observer.phase("forward")
            observer.begin_batch(pl_module)
            observer.see(pl_module, trainer.optimizers, batch)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            observer.phase("backward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            observer.phase("optimizer")
            observer.see(pl_module, trainer.optimizers, None)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            observer.phase(None)
            observer.see(pl_module, trainer.optimizers, batch)
            self.has_trained = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            # max_epochs stays the user's: a checkpoint may be of a later epoch. The epoch of one that was written
            # within an epoch may be over at once.
            if observer.spec.steps is not None and self.has_trained:
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

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            observer.end()

    return DryRunObserver()


class _LargestLast:
    """A training loader cut to a few batches, the last of which is the largest that the whole loader can give."""

    def __init__(self, loader: Any, largest: Any, length: int) -> None:
        self._loader, self._largest, self._length = loader, largest, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from islice(self._loader, self._length - 1)
        yield next(iter(self._largest))


def _with_largest(observer: RunObserver, trainer: Any, loader: Any) -> Any:
    """Return a loader that ends with its largest batch, where samples differ in size and not all batches run."""
    length = trainer.num_training_batches
    if n_samples_of(loader) is None or length >= len(loader):
        return loader
    sizes = known_sizes(loader, None)
    if sizes is None or not sizes.vary:
        return loader
    observer.note(f"The last training batch is the largest that the loader can give: {sizes.described()}.")
    return _LargestLast(loader, worst_first(loader, None, sizes), length)


def _cut_trainer(observer: RunObserver, trainer_class: Any, lightning: ModuleType) -> None:
    """Make every Trainer that is created from now on short, and keep it away from the user's files."""
    original = trainer_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **_limited(observer, options, lightning))

    trainer_class.__init__ = init
    save = trainer_class.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, filepath: Any, *args: Any, **options: Any) -> None:
        if type(self.strategy).__name__ in _SHARDING:
            observer.note("Checkpoints were not written: all ranks write those of a sharded model, and one was run.")
            return
        strategy = self.strategy
        if not strategy.is_global_zero:  # whose checkpoint rank 0 writes, which is not run
            strategy.save_checkpoint = strategy.checkpoint_io.save_checkpoint
        try:
            save(self, observer.files.within_run(filepath), *args, **options)
        finally:
            vars(strategy).pop("save_checkpoint", None)

    trainer_class.save_checkpoint = save_checkpoint
    for name in ("fit", "validate", "test", "predict"):
        setattr(trainer_class, name, _with_checkpoints_there(observer, getattr(trainer_class, name)))


def _read_from_run(observer: RunObserver, module: ModuleType) -> None:
    """Make `load_from_checkpoint` find what the script wrote by `Trainer.save_checkpoint`."""
    original = vars(module.LightningModule)["load_from_checkpoint"]

    def load_from_checkpoint(cls: type, checkpoint_path: Any, *args: Any, **options: Any) -> Any:
        return original.__get__(None, cls)(observer.files.to_read(checkpoint_path), *args, **options)

    module.LightningModule.load_from_checkpoint = classmethod(load_from_checkpoint)


def _with_checkpoints_there(observer: RunObserver, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Trainer method that loads the run's own checkpoints, and skips those that it did not write."""
    signature, place = inspect.signature(method), Path(observer.spec.directory)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        given = signature.bind(self, *args, **options).arguments
        wanted = given.get("ckpt_path")
        if wanted == "best" or (wanted is None and given.get("model") is None and self.model is not None):
            wanted = getattr(self.checkpoint_callback, "best_model_path", "")
        if wanted not in {None, "last", "hpc"}:
            path = observer.files.to_read(wanted or place / "none")
            given["ckpt_path"] = str(path)
            if Path(path).is_relative_to(place) and not Path(path).exists():
                observer.note("A checkpoint that this run did not write was not loaded: the model was used as it was.")
                given |= {"ckpt_path": None, "model": given.get("model") or self.lightning_module}
        return method(**given)

    return call


def _limited(observer: RunObserver, options: dict[str, Any], lightning: ModuleType) -> dict[str, Any]:
    """Return a Trainer's arguments for a dry run."""
    spec, limited = observer.spec, dict(options)
    callbacks = limited.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    from lightning_memtools import OOMReport  # noqa: PLC0415, for Lightning's users only

    if not any(isinstance(one, OOMReport) for one in callbacks):
        callbacks.append(OOMReport(directory=str(Path(spec.directory) / "memtools")))
    observer.reporting = [one for one in callbacks if isinstance(one, OOMReport)]
    for one in observer.reporting:
        one.checks_seconds = spec.checks_seconds
    if spec.strategy is not None and limited.get("strategy", "auto") == "auto":
        limited |= {"strategy": spec.strategy, "devices": spec.devices, "accelerator": "gpu"}
    limited["callbacks"] = [*callbacks, _callback_for(observer, lightning)]
    limited["default_root_dir"] = spec.directory
    limited["logger"] = _loggers(limited.get("logger"), Path(spec.directory), lightning)
    _compare_devices(observer, limited)
    limited.setdefault("enable_progress_bar", False)
    limited.setdefault("enable_model_summary", False)
    if limited.get("fast_dev_run"):
        return limited
    if spec.steps is not None:
        batches = spec.steps * max(1, int(limited.get("accumulate_grad_batches") or 1))
        limited |= {"min_epochs": None, "min_steps": None, "max_time": None}
        limited["check_val_every_n_epoch"] = 1
        if isinstance(limited.get("val_check_interval"), int):
            limited["val_check_interval"] = 1.0
        for stage, most in (("train", batches), ("val", spec.steps), ("test", spec.steps), ("predict", spec.steps)):
            given = limited.get(f"limit_{stage}_batches")
            limited[f"limit_{stage}_batches"] = (
                min(most, given) if isinstance(given, int) else 0 if given == 0 else most
            )
        observer.note(
            f"Each training run was cut to {spec.steps} optimizer steps of one epoch, each evaluation run to "
            f"{spec.steps} batches (--steps)."
        )
    return limited


def _compare_devices(observer: RunObserver, options: dict[str, Any]) -> None:
    """Note it if a Trainer asks for another number of devices than there are."""
    wanted = options.get("devices")
    if isinstance(wanted, str):
        wanted = int(wanted) if wanted.isdigit() else None
    count = len(wanted) if isinstance(wanted, (list, tuple)) else wanted
    if isinstance(count, int) and count > 0:
        count *= int(options.get("num_nodes") or 1)
        if count != observer.spec.devices:
            observer.note(
                f"The script's Trainer asks for {count} devices, and this dry run has {observer.spec.devices}: give "
                f"--devices {count}."
            )


def _loggers(given: Any, place: Path, lightning: ModuleType) -> Any:
    """Return loggers like those given that write into the run's folder, or nowhere."""
    if given is None or isinstance(given, bool):
        return given
    loggers = lightning.pytorch.loggers if hasattr(lightning, "pytorch") else lightning.loggers

    def redirected(logger: Any) -> Any:
        if isinstance(logger, (loggers.TensorBoardLogger, loggers.CSVLogger)):
            return type(logger)(save_dir=str(place), name=logger.name, version=logger.version)
        return loggers.logger.DummyLogger()

    return [redirected(one) for one in given] if isinstance(given, (list, tuple)) else redirected(given)


class _WhenImported(importlib.abc.MetaPathFinder):
    """An import hook: calls a function with a module when the script imports it."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._functions = dict(functions)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that calls the function afterwards."""
        function = self._functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def cut_trainers_when_imported(observer: RunObserver) -> None:
    """Cut the Trainers of Lightning short, under whichever of its two names the script imports it."""

    def cut(package: str) -> Callable[[ModuleType], None]:
        def function(module: ModuleType) -> None:
            _cut_trainer(observer, module.Trainer, importlib.import_module(package))

        return function

    names = {
        "lightning.pytorch.trainer.trainer": "lightning.pytorch",
        "pytorch_lightning.trainer.trainer": "pytorch_lightning",
    }
    _when_imported({name: cut(package) for name, package in names.items()})
    read = functools.partial(_read_from_run, observer)
    _when_imported(dict.fromkeys(("lightning.pytorch.core.module", "pytorch_lightning.core.module"), read))
    _when_imported(dict.fromkeys(("lightning.fabric.fabric", "lightning_fabric.fabric"), observer.files.guard_fabric))


@contextmanager
def values_followed() -> Iterator[KnownValues]:
    """Follow the values of the data inside, until the script compiles something: compiled code ignores modes."""
    patches = Patches()
    with values_known() as known, ExitStack() as following:
        following.enter_context(FollowedValues(known))

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                following.close()
                return original(*args, **kwargs)

            return compile_

        patches.replace(torch, "compile", make)
        try:
            yield known
        finally:
            patches.undo()


def _when_imported(functions: Mapping[str, Callable[[ModuleType], object]]) -> None:
    sys.meta_path.insert(0, _WhenImported(functions))


def keep_peaks(observer: RunObserver) -> None:
    """Let the script reset the device's peaks without losing them for the result."""
    is_resetting = False

    def make(reset: Callable[..., None]) -> Callable[..., None]:
        def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
            nonlocal is_resetting
            if not is_resetting:  # the observer resets them too
                is_resetting = True
                try:
                    observer.take_in_peaks()
                finally:
                    is_resetting = False
            reset(*args, **kwargs)

        return reset_peak_memory_stats

    patches = Patches()
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
        patches.replace(module, "reset_peak_memory_stats", make)
