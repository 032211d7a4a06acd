"""All uses of Lightning's private attributes, each with the reason why no public way serves.

If a docstring says that there is no public way, the function can go once there is one. No other file of the package
uses a private attribute of Lightning; tests/house_rules.py checks that.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PACKAGE = next((name for name in list(sys.modules) if name in _PACKAGES), _PACKAGES[0])
"""The package of the program's Trainers: the same code is published as two, whose classes are different objects.

It is the one that the program imported first; `lightning.pytorch` if it has imported none.
"""
(_OTHER,) = {*_PACKAGES} - {PACKAGE}


def part_of_lightning(name: str) -> Any:
    """Import a submodule, such as "loggers", of the package in use: `lightning.pytorch` or `pytorch_lightning`."""
    return importlib.import_module(f"{PACKAGE}.{name}")


if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback  # noqa: PLC0414, other files import it from here
    from lightning.pytorch import LightningModule as LightningModule  # noqa: PLC0414, as above
    from lightning.pytorch import Trainer as Trainer  # noqa: PLC0414, as above
else:
    Callback = part_of_lightning("callbacks").Callback
    LightningModule = part_of_lightning("core").LightningModule
    Trainer = part_of_lightning("trainer").Trainer


def refuse_other_package(thing: object) -> None:
    """Raise if an object is from `pytorch_lightning` although the program imported `lightning` first, or vice versa.

    Raises:
        RuntimeError: The object's class comes from the package that was not imported first.
    """
    kind = next((kind for kind in type(thing).__mro__ if kind.__module__.startswith(f"{_OTHER}.")), None)
    if kind is not None:
        raise RuntimeError(
            f"This {kind.__name__} is of {_OTHER}, but lightning_memtools works with {PACKAGE} in this program: the "
            "package that was imported first. Use one of the two, and import it before lightning_memtools."
        )


def _refusing_other_package(setup: Callable[..., None]) -> Callable[..., None]:
    @wraps(setup)
    def checked(self: Any, trainer: Trainer, *args: Any, **options: Any) -> None:
        refuse_other_package(trainer)
        setup(self, trainer, *args, **options)

    return checked


class EitherCallback(Callback):
    """Base class of this package's callbacks. With a Trainer from the wrong Lightning package, `setup` raises.

    The right package is the one that the program imported first: `lightning` or `pytorch_lightning`.

    Attributes:
        parts_of_a_run: The names of attributes that are set only during a run. They are None in a copy or a pickle.
    """

    parts_of_a_run: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "setup" in vars(cls):
            cls.setup = _refusing_other_package(cls.setup)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        arguments = inspect.signature(type(self).__init__).parameters.items()
        values = {name: getattr(self, name, argument.default) for name, argument in arguments if name != "self"}
        given = [f"{name}={value!r}" for name, value in values.items() if value != dict(arguments)[name].default]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(self.parts_of_a_run)


def training_step(trainer: Trainer) -> int:
    """Return the step number that `self.log` uses as the x value: how many training steps finished before this one.

    `trainer.global_step` is no substitute, because it counts optimizer steps: it is one too high in on_train_batch_end,
    and grows by n per batch with n optimizers. Remove this once the Trainer has a public counter of training steps.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def running_stage(trainer: Trainer) -> Literal["train", "val", "test", "predict"]:
    """Return the running stage: "train", "val" (also for the sanity check), "test" or "predict"."""
    stage: Any = trainer.state.stage
    return stage.dataloader_prefix  # type: ignore[no-any-return]


def is_accumulating(trainer: Trainer) -> bool:
    """Return True if the current batch only accumulates gradients; always False with manual optimization.

    The public counters are not enough if an epoch ends in the middle of an accumulation, or if a loader has no length.
    Remove this once the Trainer has a public attribute for it.
    """
    if trainer.lightning_module is not None and not trainer.lightning_module.automatic_optimization:
        return False
    return trainer.fit_loop._should_accumulate()


def values_logged_in_step(trainer: Trainer) -> dict[str, Tensor]:
    """Return the scalars that training_step logged with `self.log(..., on_step=True)` for the current batch, by name.

    The values stay on their device. `trainer.callback_metrics` is no substitute: each access computes all epoch metrics
    and it is updated only after callbacks have run. Remove this once on_train_batch_end can read the values of a step.
    """
    results: Any = trainer.fit_loop._results
    found: dict[str, Tensor] = {}
    for key, metric in results.items():
        value = metric._forward_cache  # the value of this very step
        if (
            key.startswith("training_step.")
            and metric.meta.on_step
            and isinstance(value, Tensor)
            and value.numel() == 1
        ):
            found[metric.meta.name] = value
    return found


def values_logged_in_evaluation(trainer: Trainer) -> dict[str, Tensor]:
    """Return the epoch values logged with `self.log` in a validation or test run, by name. Call this when the run ends.

    With several data loaders, each name ends with "/dataloader_idx_<i>", as in Lightning. `trainer.callback_metrics`
    mixes these values with those of training; only private results tell them apart. Remove this once Lightning has a
    public API for the metrics of one loop.
    """
    results: Any = trainer._results
    found: dict[str, Tensor] = {}
    for metric in (results or {}).values():
        index = metric.meta.dataloader_idx
        suffix = "" if index is None else f"/dataloader_idx_{index}"
        for name in (metric.meta.forked_name(on_step=False), metric.meta.name):
            value = trainer.callback_metrics.get(name + suffix)
            if isinstance(value, Tensor) and value.numel() == 1 and metric.meta.on_epoch:
                found[metric.meta.name + suffix] = value
                break
    return found


def _counters_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return all counters that a training step advances: batch counters, then those of epochs and optimizer steps."""
    loop: Any = trainer.fit_loop.epoch_loop
    by_lightning = loop.automatic_optimization.optim_progress.optimizer
    updates = [by_lightning.step, by_lightning.zero_grad, loop.manual_optimization.optim_step_progress]
    progresses = [loop.batch_progress, trainer.fit_loop.epoch_progress, loop.scheduler_progress, *updates]
    return [vars(counts) for progress in progresses for counts in (progress.total, progress.current)]


class LoopMarker:
    """Saves and restores all counters that a training step advances, and the states of the LR schedulers.

    The public `trainer.global_step` is read-only. Create the marker once training has started, because some counters
    do not exist before. Remove this class once a public API can set a Trainer back to an earlier step.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._counters = _counters_of(trainer)

    def mark_updates(self) -> Callable[[], None]:
        """Save the counters of optimizer steps and the LR schedulers' states; return a function that restores them.

        The batch counters are not restored: a batch still counts as seen after its update has been undone.
        """
        return self._saved(self._counters[4:])

    def mark(self) -> Callable[[], None]:
        """Save all counters and LR scheduler states; return a function that restores them. Loaders are not rewound."""
        loop, restore = self._trainer.fit_loop.epoch_loop, self._saved(self._counters)
        stepped, is_last = loop._batches_that_stepped, loop.batch_progress.is_last_batch

        def turn_back() -> None:
            restore()
            for counts in self._counters[:2]:
                # As if the batch had not begun: otherwise, a run that resumes from here counts one step too many.
                counts.update(dict.fromkeys(counts, counts["completed"]))
            loop._batches_that_stepped, loop.batch_progress.is_last_batch = stepped, is_last

        return turn_back

    def _saved(self, counters: list[dict[str, Any]]) -> Callable[[], None]:
        saved = [(counts, dict(counts)) for counts in counters]
        schedulers = [
            (config.scheduler, config.scheduler.state_dict()) for config in self._trainer.lr_scheduler_configs
        ]

        def restore() -> None:
            for counts, values in saved:
                counts.update(values)
            for scheduler, state in schedulers:
                scheduler.load_state_dict(state)

        return restore


def guard_saving(trainer: Trainer, check: Callable[[], None]) -> Callable[[], None]:
    """Make the Trainer call `check` before it saves a checkpoint, and return a function that undoes this.

    If `check` raises, nothing is saved. The hook on_save_checkpoint is not enough: weights-only checkpoints skip it.
    """

    def checked(save: Callable[..., Any], *args: Any, **options: Any) -> None:
        check()
        save(*args, **options)

    return _ReplacedMethod(trainer, "save_checkpoint", checked).undo


def watch_updates(trainer: Trainer, before_update: Callable[[Any], None]) -> Callable[[], None]:
    """Make Lightning call `before_update(optimizer)` right before each optimizer step; return a function to undo this.

    By then, gradients have been clipped and all hooks have run. No hook runs that late, so this replaces a method of
    the precision plugin. Both automatic and manual optimization call that method.
    """

    def watched(after_closure: Callable[..., Any], model: Any, optimizer: Any) -> None:
        after_closure(model, optimizer)
        before_update(optimizer)

    return _ReplacedMethod(trainer.precision_plugin, "_after_closure", watched).undo


class _ReplacedMethod:
    """Replaces a method of one object until `undo` is called. `replacement` gets the original as its first argument."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        self._original = getattr(owner, name)
        # Lightning reads the names of a step's arguments from it.
        self.__wrapped__ = getattr(self._original, "__wrapped__", self._original)
        self._is_active = True
        setattr(owner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._is_active:
            return self._original(*args, **options)
        return self._replacement(self._original, *args, **options)

    def undo(self) -> None:
        """Restore the original method. Idempotent."""
        self._is_active = False
        # Someone else may have wrapped it since: then ours stays inside theirs and does nothing of its own.
        if vars(self._owner).get(self._name) is self:
            if getattr(self._original, "__self__", None) is self._owner:
                del vars(self._owner)[self._name]
            else:
                setattr(self._owner, self._name, self._original)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(memo.get(id(self._owner), self._owner), self._name)


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a full checkpoint without the barrier that ends `trainer.save_checkpoint`. Call this on every rank.

    If rank 0 failed to write, the others would wait in that barrier forever. Remove this once Lightning prevents that.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(checkpoint, path)


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Return `trainer.callbacks`, typed as a list: Lightning has no annotation for that attribute."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    return callbacks


def forget_batch(trainer: Trainer) -> None:
    """Release the batch of a failed step, which Lightning still holds for `self.log`. No public API does this."""
    results: Any = trainer._results
    if results is not None:
        results.batch = None


# What they do is named as a phase of the batch.
_STEP_HOOKS = {"optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"}


def running_hook() -> str:
    """Return the hook or task that Lightning is running, such as "EMA.on_train_epoch_end" or "saving a checkpoint".

    Return "" if there is none, as in training_step. Lightning reports hooks only to profilers, so this reads the stack.
    """
    frame = inspect.currentframe()
    hook = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(("trainer/call.py", "checkpoint_connector.py", "trainer/trainer.py")):
            name = _hook_of(code.co_name, frame)
            if name in {"loading a checkpoint", "saving a checkpoint"}:
                return f"{name}, in {hook}" if hook else name
            hook = hook or name
        frame = frame.f_back
    return hook


def _hook_of(function: str, frame: FrameType) -> str:
    """Return the hook or task that a stack frame of Lightning runs, such as "saving a checkpoint", or "" if none."""
    if function.startswith(("restore", "_restore", "resume_start")):
        return "loading a checkpoint"
    if function in {"save_checkpoint", "dump_checkpoint"}:
        return "saving a checkpoint"
    if function not in {"_call_callback_hooks", "_call_lightning_module_hook"} and "_call_callbacks_" not in function:
        return {"_call_setup_hook": "setup", "_call_configure_model": "configure_model"}.get(function, "")
    # Reading variables keeps them alive as long as the frame, which ends with the error.
    variables = frame.f_locals
    name = variables.get("hook_name", function.removeprefix("_call_callbacks_"))
    if function == "_call_lightning_module_hook":
        return "" if name in _STEP_HOOKS else f"{type(variables.get('pl_module')).__name__}.{name}"
    callback = type(variables.get("callback"))
    # Ours put the model on a VirtualDevice, and report when the step has unwound: what runs is not theirs.
    return "" if callback.__module__.startswith("lightning_memtools.") else f"{callback.__name__}.{name}"


def untoggle_all(module: Any) -> None:
    """Restore each parameter's `requires_grad` after a failure between `toggle_optimizer` and `untoggle_optimizer`.

    `untoggle_optimizer` needs the toggled optimizer as an argument, and no public API tells which one that is.
    """
    before: Mapping[Any, bool] = module._param_requires_grad_state
    for parameter, requires_grad in before.items():
        parameter.requires_grad = requires_grad
    module._param_requires_grad_state = {}


def saves_on_exception(trainer: Trainer) -> bool:
    """Return True if the Trainer has a ModelCheckpoint that saves a checkpoint when training fails."""
    return any(getattr(callback, "save_on_exception", False) for callback in callbacks_of(trainer))


def forbid_saving_on_exception(trainer: Trainer) -> None:
    """Keep ModelCheckpoint(save_on_exception=True) from saving the current weights, which are known to be bad.

    ModelCheckpoint has no public switch for this, so this sets a private attribute as if this step were saved.
    """
    for callback in callbacks_of(trainer):
        if getattr(callback, "save_on_exception", False) and hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = trainer.global_step


def gradient_scaler(trainer: Trainer) -> Any:
    """Return the GradScaler of a Trainer with precision="16-mixed", or None with another precision."""
    return getattr(trainer.precision_plugin, "scaler", None)


def loop_of(trainer: Trainer, stage: Literal["train", "val", "test", "predict"]) -> Any:
    """Return the Trainer's loop for a stage. During `trainer.fit`, "val" gives the validation loop inside training."""
    if stage == "val" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return {"train": trainer.fit_loop, "val": trainer.validate_loop, "test": trainer.test_loop,
            "predict": trainer.predict_loop}[stage]  # fmt: skip


def source_of(loop: Any) -> Any:
    """Return the object from which a loop gets its data loaders.

    The object knows whether the loaders were passed to the Trainer or come from a hook. No public API tells this.
    """
    return loop._data_source


def forget_saved_arguments(loader: Any) -> None:
    """Make Lightning use a loader's current attributes when it recreates the loader with another sampler.

    Otherwise Lightning would use the arguments that it saved from the constructor, with the old batch size.
    """
    for name in [name for name in vars(loader) if name.startswith("__pl_saved")]:
        delattr(loader, name)


def forget_loaders(loop: Any) -> None:
    """Stop the worker processes of a loop's data loaders, and make the loop's next `setup_data` create new loaders.

    The public `reload_dataloaders_every_n_epochs` works only between epochs, which is too late for a new batch size.
    """
    fetcher = loop._data_fetcher
    if fetcher is not None:
        fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None


def prepared_loaders(loop: Any) -> list[Any]:
    """Return a flat list of a loop's data loaders as set up by Lightning, with its samplers; [] before the setup.

    The public `trainer.train_dataloader` keeps the nesting that the user passed. Remove this once the Trainer
    exposes the flat list.
    """
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def replace_loaders(loop: Any, change: Callable[[Any], Any]) -> None:
    """Replace each data loader of a loop with `change(loader)`. If the loop already has an iterator, make a new one."""
    before = prepared_loaders(loop)
    after = [change(one) for one in before]
    if any(new is not old for new, old in zip(after, before, strict=True)):
        loop._combined_loader.flattened = after
        if loop._data_fetcher is not None:
            iter(loop._data_fetcher)


def validate_every(trainer: Trainer, n_batches: int) -> None:
    """Validate after every `n_batches` training batches of each epoch, whatever the Trainer's own settings are.

    Setting `val_check_interval` has no effect once loaders are set up, so this sets the attributes derived from it.
    """
    trainer.val_check_batch = n_batches
    trainer.check_val_every_n_epoch = 1
    vars(trainer)["_val_check_time_interval"] = None


def set_root_directory(trainer: Trainer, directory: str) -> None:
    """Set a Trainer's `default_root_dir`. In the public API, only the constructor can set it."""
    vars(trainer)["_default_root_dir"] = directory


def without_collectives(trainer: Trainer) -> None:
    """Turn the collective operations that run in every batch into no-ops on this rank. The caller has to undo it.

    A rank that has run out of memory can no longer take part, so the other ranks would wait for it. Lightning has no
    switch to turn these operations off.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    strategy: Any = trainer.strategy
    strategy.barrier = lambda *args, **kwargs: None  # noqa: ARG005, nobody is waited for
    strategy.broadcast = lambda obj, src=0: obj  # noqa: ARG005, as on one rank
    strategy.reduce_boolean_decision = lambda decision, all=True: decision  # noqa: A006, ARG005, Lightning's name
    strategy.reduce = lambda tensor, *args, **kwargs: tensor  # noqa: ARG005, what sync_dist=True logs: a number
    for module in trainer.lightning_module.modules():
        if hasattr(module, "distributed_available_fn"):  # a torchmetrics.Metric: what it keeps is this rank's own
            vars(module)["distributed_available_fn"] = lambda: False


def correct_logged_hparam(owner: Any, name: str, value: int) -> None:
    """Correct a hyperparameter that loggers will get. Do nothing if `owner.save_hyperparameters` did not save it."""
    initial = getattr(owner, "_hparams_initial", None)
    if initial is not None and name in initial:
        initial[name] = value


def end_the_call() -> BaseException:
    """Return an exception that makes `trainer.fit` or `trainer.validate` end normally if raised before the loop runs.

    Lightning's tuners raise it, too. `trainer.should_stop` does not help: `fit` resets it and runs the sanity check.
    """
    error: BaseException = part_of_lightning("utilities.exceptions")._TunerExitException()
    return error


def is_compiled_by_lightning(module: LightningModule) -> bool:
    """Return True if the user passed `torch.compile(module)` to the Trainer.

    The Trainer unwraps the module and passes the plain one to hooks; only a private attribute shows this.
    """
    return getattr(module, "_compiler_ctx", None) is not None


@dataclass(frozen=True, slots=True)
class StepClosure:
    """The parts of the closure that Lightning runs for each training batch.

    Attributes:
        batch: The training batch.
        forward: Runs training_step on a batch and returns Lightning's result object (with `closure_loss` and `extra`).
        results: Lightning's collection of the values that training has logged with `self.log`.
        backward: Runs the backward pass of a loss.
        zero_grad: Clears the gradients; None if this batch adds to the gradients of earlier batches.
    """

    batch: Any
    forward: Callable[[Any], Any]
    results: Any
    backward: Callable[[Tensor], None]
    zero_grad: Callable[[], None] | None


def replace_closures(trainer: Trainer, run: Callable[[StepClosure], Any]) -> Callable[[], None]:
    """Make Lightning call `run` in place of each training batch's forward and backward; return a function to undo this.

    No hook wraps both passes. Only Lightning's closure, which `run` receives, can run them twice for the same batch.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization

    def made(make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        if closure._backward_fn is None or "batch" not in kwargs:
            return closure
        # Nothing here refers to the closure: in a cycle it would keep the batch until garbage is collected.
        step_fn = closure._step_fn

        def forward(batch: Any) -> Any:
            whole = kwargs["batch"]
            kwargs["batch"] = batch
            try:
                return step_fn()
            finally:
                kwargs["batch"] = whole

        step = StepClosure(
            kwargs["batch"], forward, trainer.fit_loop._results, closure._backward_fn, closure._zero_grad_fn
        )

        def with_gradients(*_args: Any, **_options: Any) -> Any:
            with torch.enable_grad():
                return run(step)

        closure.closure = with_gradients
        return closure

    return _ReplacedMethod(loop, "_make_closure", made).undo


def attach(trainer: Trainer, module: LightningModule, stage: str, loader: Any) -> None:
    """Prepare a Trainer to run a stage's loop on a module and a data loader without `fit`. Its logging is turned off.

    No public API runs a single loop. Remove `attach`, `begin_training` and `accumulate_while` once there is one.
    """
    states, connector = part_of_lightning("trainer.states"), trainer._logger_connector
    trainer.state.fn = states.TrainerFn({"train": "fit", "val": "validate"}.get(stage, stage))
    trainer.state.stage = states.RunningStage("validate" if stage == "val" else stage)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, **{f"{stage}_dataloaders": loader})
    connector.log_metrics = lambda *_args, **_options: None  # type: ignore[method-assign]
    connector.reset_results()
    connector.reset_metrics()
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def begin_training(trainer: Trainer, *, runs_hooks: bool) -> Any:
    """Begin a training epoch after `attach`, and return Lightning's data fetcher, which yields the batches.

    If `runs_hooks` is True, call the module's on_fit_start, on_train_start and on_train_epoch_start.
    """
    loop: Any = trainer.fit_loop
    loop.min_epochs, loop.max_epochs = 0, 1
    loop.setup_data()
    loop.reset()
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start") if runs_hooks else ():
        part_of_lightning("trainer.call")._call_lightning_module_hook(trainer, hook)
    loop.epoch_loop.reset()
    loop.epoch_loop.on_run_start(loop._data_fetcher)
    return loop._data_fetcher


def count_as(trainer: Trainer, original: Trainer) -> None:
    """Set the epoch, scheduler and optimizer counters of `trainer` to those of another Trainer, `original`."""
    for counts, others in zip(_counters_of(trainer)[2:], _counters_of(original)[2:], strict=True):
        counts.update(others)
    steps: Any = original.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps._batches_that_stepped


def accumulate_while(trainer: Trainer, condition: bool) -> None:
    """Set whether batches only accumulate gradients (`condition` is True) or each run the optimizer step (False)."""
    trainer.fit_loop._should_accumulate = lambda: condition  # type: ignore[method-assign]
