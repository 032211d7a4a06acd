"""Uses of Lightning's private attributes, each with the reason why no public way serves and when it can go.

Where a docstring says that there is no public way to do or to ask something, the use can go once there is one.
Nothing else in the package touches a private attribute of Lightning; tests/house_rules.py keeps that.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch import Tensor

from lightning_memtools.argument_types import check_types


def twins(*classes: type) -> tuple[type, ...]:
    """Return classes of `lightning`, and those of the same names in `pytorch_lightning` if the program has imported it.

    The same code is published as two packages, whose classes are different objects. Types written in this package are
    those of `lightning`; wherever a class is asked for while a program runs, both count.
    """
    found = list(classes)
    for one in classes:
        module = sys.modules.get(one.__module__.replace("lightning.pytorch", "pytorch_lightning", 1))
        found += [getattr(module, one.__name__)] if hasattr(module, one.__name__) else []
    return tuple(dict.fromkeys(found))


class EitherCallback(Callback):
    """A callback for Trainers of `lightning` and of `pytorch_lightning`.

    It inherits from the other package's Callback too once that is imported: its LightningCLI takes no other class.
    A copy or a pickle that is made during a run is that of a callback before its run.

    Attributes:
        parts_of_a_run: The names of attributes that are None outside of a run, and that cannot be pickled.
    """

    parts_of_a_run: ClassVar[tuple[str, ...]] = ()
    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Inherit from what was imported since, too, and keep what was given for `repr`."""
        _inherit_from_twin()
        if cls.__init__.__module__.startswith("lightning_memtools."):  # a user's own subclass has its own rules
            check_types(cls.__init__, options)
        made = super().__new__(cls)
        if arguments or options:
            made._given = (arguments, options)
        return made

    def __repr__(self) -> str:
        arguments, options = self._given
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        return f"{type(self).__name__}({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(self.parts_of_a_run)


def _inherit_from_twin() -> None:
    if EitherCallback.__bases__ != twins(Callback):
        EitherCallback.__bases__ = twins(Callback)


_inherit_from_twin()


def training_step(trainer: Trainer) -> int:
    """Return the x axis of `self.log`: the number of training steps that were finished before the present one.

    `trainer.global_step` counts optimizer steps: one too many in on_train_batch_end, and n a batch with n optimizers.
    It can go when the Trainer has a public counter of training steps.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def running_stage(trainer: Trainer) -> Literal["train", "val", "test", "predict"]:
    """Return the stage that a loop runs, the sanity check as "val"; nothing public has Lightning's short names."""
    stage: Any = trainer.state.stage
    return stage.dataloader_prefix  # type: ignore[no-any-return]


def is_accumulating(trainer: Trainer) -> bool:
    """Return True if the present micro-batch is not the last of its step; always False in manual optimization.

    The public counters do not know of a last, incomplete accumulation or of iterable loaders; the loop does. It can go
    when the Trainer says in public whether it accumulates.
    """
    if trainer.lightning_module is not None and not trainer.lightning_module.automatic_optimization:
        return False
    return trainer.fit_loop._should_accumulate()


def loss_of(output: Any) -> Any:
    """Return the loss in what a training step returned: the output itself, or the item "loss" of a mapping."""
    return output.get("loss") if isinstance(output, Mapping) else output


def values_logged_in_step(trainer: Trainer) -> dict[str, Tensor]:
    """Return the scalars that training_step logged with `self.log(..., on_step=True)` for the current batch, by name.

    They stay on their device. `trainer.callback_metrics` computes every epoch metric at each access, and is only filled
    after callbacks ran. This function can go when the values of a step can be read in on_train_batch_end.
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
    """Return what the evaluation run that is ending gave to `self.log`: name to its value over the whole run.

    With several data loaders a name ends with "/dataloader_idx_<i>", as Lightning writes it.

    `trainer.callback_metrics` also holds what training logged; only the results know which hook a value came from. It
    can go when Lightning offers the metrics of one loop in public.
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


class LoopMarker:
    """Saves every counter that a training step moves, and the state of every scheduler, to restore them.

    `trainer.global_step` is read-only, and checkpoints are written from these counters. It can go when a Trainer can be
    set back to an earlier step in public. Make it when training starts: only then all counters are in their places.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        epoch_loop = self._epoch_loop = trainer.fit_loop.epoch_loop
        self._batches = epoch_loop.batch_progress
        progresses: list[Any] = [
            self._batches,
            trainer.fit_loop.epoch_progress,
            epoch_loop.scheduler_progress,
            epoch_loop.automatic_optimization.optim_progress.optimizer.step,
            epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad,
            epoch_loop.manual_optimization.optim_step_progress,
        ]
        self._counters: list[dict[str, Any]] = [vars(one) for each in progresses for one in (each.total, each.current)]

    def mark_updates(self) -> Callable[[], None]:
        """Save the counters of updates and the schedulers alone, and return the function that restores them.

        The batches and the x axis of the logs go on: the batches whose updates are taken back count as seen.
        """
        counters = self._counters[4:]
        return partial(self._put_back, counters, list(map(dict.copy, counters)), self._states_of_schedulers())

    def mark(self) -> Callable[[], None]:
        """Save them now, and return the function that restores them; the data loaders are not set back."""
        return partial(
            self._turn_back,
            list(map(dict.copy, self._counters)),
            self._states_of_schedulers(),
            self._epoch_loop._batches_that_stepped,
            self._batches.is_last_batch,
        )

    def _turn_back(
        self, counts: list[dict[str, Any]], schedulers: list[tuple[Any, Any]], stepped: int, is_last: bool
    ) -> None:
        for values in counts[:2]:
            # As if the batch had not begun: otherwise, a run that resumes from here counts one step too many.
            values.update(dict.fromkeys(values, values["completed"]))
        self._put_back(self._counters, counts, schedulers)
        self._epoch_loop._batches_that_stepped, self._batches.is_last_batch = stepped, is_last

    def _states_of_schedulers(self) -> list[tuple[Any, Any]]:
        return [(config.scheduler, config.scheduler.state_dict()) for config in self._trainer.lr_scheduler_configs]

    @staticmethod
    def _put_back(
        counters: list[dict[str, Any]], counts: list[dict[str, Any]], schedulers: list[tuple[Any, Any]]
    ) -> None:
        for held, values in zip(counters, counts, strict=True):
            held.update(values)
        for scheduler, state in schedulers:
            scheduler.load_state_dict(state)


class EvaluationBatchEnd(NamedTuple):
    """The arguments that Lightning passes to on_validation_batch_end and on_test_batch_end."""

    trainer: Trainer
    module: LightningModule
    outputs: Any
    batch: Any
    batch_idx: int
    dataloader_idx: int = 0

    @property
    def stage(self) -> Literal["val", "test"]:
        """The stage that is running."""
        return "test" if self.trainer.testing else "val"

    @property
    def place(self) -> str:
        """The batch within its data loader as text, where there are several data loaders; else ""."""
        n_batches = self.trainer.num_test_batches if self.stage == "test" else self.trainer.num_val_batches
        return f"batch {self.batch_idx} of data loader {self.dataloader_idx}" if len(n_batches) > 1 else ""


def guard_saving(trainer: Trainer, check: Callable[[], None]) -> Callable[[], None]:
    """Call `check` before each checkpoint, and return the function that undoes this.

    If `check` raises, nothing is saved. The hook on_save_checkpoint is not called for checkpoints of weights alone; the
    method of the Trainer is replaced until Lightning has a hook that is.
    """
    guarded = _MethodWithAddition(trainer, "save_checkpoint", before=check)
    return guarded.undo


def watch_updates(trainer: Trainer, before_update: Callable[[Any], None]) -> Callable[[], None]:
    """Call `before_update` with the optimizer right before each update, and return the function that undoes this.

    By then gradients are clipped and all hooks are over, which no hook of Lightning's is. The precision plugin runs
    this method for every kind of optimization; it can go when there is a hook after configure_gradient_clipping.
    """
    watched = _MethodWithAddition(
        trainer.precision_plugin, "_after_closure", after=lambda _model, optimizer: before_update(optimizer)
    )
    return watched.undo


class _MethodWithAddition:
    """Replaces a method of one object by itself with something before or after it. A pickle or copy has the method."""

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[..., None] = lambda *_args, **_options: None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        self._owner, self._name, self._before, self._after, self._around = owner, name, before, after, around
        self._original = getattr(owner, name)
        if around is not None:
            # Lightning reads the names of a step's arguments from it.
            self.__wrapped__ = getattr(self._original, "__wrapped__", self._original)
        self._is_active = True
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_active:
            return self._original(*args, **kwargs)
        if self._around is not None:
            return self._around(self._original, *args, **kwargs)
        self._before()
        result = self._original(*args, **kwargs)
        self._after(*args, **kwargs)
        return result

    @property
    def __func__(self) -> Callable[..., Any]:
        """The method as a function of its owner, which torch's schedulers put into a function of their own."""
        return lambda _owner, *args, **kwargs: self(*args, **kwargs)

    def undo(self) -> None:
        """Put the method back. Idempotent."""
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
    """Write a full checkpoint; call it on every rank.

    `trainer.save_checkpoint` ends with a barrier, in which the other ranks would wait for ever if rank 0 cannot write.
    It can go when Lightning releases that barrier after a failure.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(checkpoint, path)


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a Trainer; its attribute for them is typed nowhere."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    return callbacks


def forget_batch(trainer: Trainer) -> None:
    """Release the batch that the bookkeeping of `self.log` still holds after a failed step; nothing public does."""
    results: Any = trainer._results
    if results is not None:
        results.batch = None


# What they do is named as a phase of the batch.
_STEP_HOOKS = {"optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"}


def running_hook() -> str:
    """Return the hook that is running, such as "EMA.on_train_epoch_end", or what else Lightning does; "" in a step.

    It is read off the stack: Lightning tells nobody outside of a profiler.
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
    """Return what a function of Lightning's calls or does."""
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
    """Restore each parameter's `requires_grad` after a step failed between `toggle_optimizer` and `untoggle_optimizer`.

    `untoggle_optimizer` wants to know which optimizer was toggled, and nothing public tells.
    """
    before: Mapping[Any, bool] = module._param_requires_grad_state
    for parameter, requires_grad in before.items():
        parameter.requires_grad = requires_grad
    module._param_requires_grad_state = {}


def saves_on_exception(trainer: Trainer) -> bool:
    """Return True if a ModelCheckpoint will save when training fails."""
    return any(getattr(callback, "save_on_exception", False) for callback in callbacks_of(trainer))


def forbid_saving_on_exception(trainer: Trainer) -> None:
    """Keep ModelCheckpoint(save_on_exception=True) from saving this step, whose weights are bad.

    It has no public switch, so its record says that this step is saved already.
    """
    for callback in callbacks_of(trainer):
        if getattr(callback, "save_on_exception", False) and hasattr(callback, "_last_global_step_saved"):
            callback._last_global_step_saved = trainer.global_step


def gradient_scaler(trainer: Trainer) -> Any:
    """Return the GradScaler of 16-mixed training, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)


def loop_of(trainer: Trainer, stage: Literal["train", "val", "test", "predict"]) -> Any:
    """Return the loop that runs a stage in the present call of the Trainer; validation within fit has its own."""
    if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    return {"train": trainer.fit_loop, "val": trainer.validate_loop, "test": trainer.test_loop,
            "predict": trainer.predict_loop}[stage]  # fmt: skip


def source_of(loop: Any) -> Any:
    """Return the object that a loop asks for its data loaders.

    No public way tells whether these were passed or come from a hook. It can go when the Trainer shows the source.
    """
    return loop._data_source


def forget_saved_arguments(loader: Any) -> None:
    """Have Lightning construct a changed loader from its attributes when it replaces the sampler.

    It would use the arguments that it saved of the original, with the old batch size; nothing public says otherwise.
    """
    for name in [name for name in vars(loader) if name.startswith("__pl_saved")]:
        delattr(loader, name)


def forget_loaders(loop: Any) -> None:
    """Let a loop ask for its loaders again at its next `setup_data`, and end the workers of the present ones.

    The public `reload_dataloaders_every_n_epochs` acts at epochs only, and not between two batch sizes.
    """
    fetcher = loop._data_fetcher
    if fetcher is not None:
        fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None


def prepared_loaders(loop: Any) -> list[Any]:
    """Return the loaders that a loop will read, with the samplers that the Trainer put in; [] before they are set up.

    `trainer.train_dataloader` gives the collection as the user nested it, and there is none for predict. It can go when
    the Trainer gives the flat list.
    """
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def replace_loaders(loop: Any, change: Callable[[Any], Any]) -> None:
    """Change each loader of a loop that is set up; see `prepared_loaders`. No hook comes before their iterators."""
    before = prepared_loaders(loop)
    after = [change(one) for one in before]
    if any(new is not old for new, old in zip(after, before, strict=True)):
        loop._combined_loader.flattened = after
        if loop._data_fetcher is not None:
            iter(loop._data_fetcher)


def batches_in_evaluation(loop: Any) -> int:
    """Return the number of batches that an evaluation or prediction loop will run, over all its loaders."""
    limits: Any = loop.max_batches if isinstance(loop.max_batches, list) else [loop.max_batches]
    return int(min(sum(limits), 2**31))


def mode_of(loaders: Any) -> Any:
    """Return how a CombinedLoader combines its loaders, such as "max_size_cycle": it has no public attribute for it."""
    return loaders._mode


def run_sanity_check(trainer: Trainer) -> None:
    """Run the validation batches that come before training.

    In public, only `fit` does so, and it cannot be called within fit.
    """
    trainer._run_sanity_check()


def validate_every(trainer: Trainer, n_batches: int) -> None:
    """Validate after every n training batches of each epoch, whatever the Trainer's arguments say.

    `val_check_interval` is only read when loaders are set up, and an interval in seconds has a private attribute.
    """
    trainer.val_check_batch = n_batches
    trainer.check_val_every_n_epoch = 1
    vars(trainer)["_val_check_time_interval"] = None


def stop_validating(trainer: Trainer) -> None:
    """Validate no more in this fit."""
    trainer.check_val_every_n_epoch = 2**62


def set_root_directory(trainer: Trainer, directory: str) -> None:
    """Set the default directory for files; `default_root_dir` can only be set in the Trainer's constructor."""
    vars(trainer)["_default_root_dir"] = directory


def without_collectives(trainer: Trainer) -> None:
    """Replace the collectives that the loop itself runs in every batch, until the loop's attributes are restored.

    A rank that has run out of memory does not take part in them any more, and the others would wait for it. Lightning
    has no switch for them.
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
    """Let loggers see a value that was found after `save_hyperparameters`, which keeps a private copy for them."""
    initial = getattr(owner, "_hparams_initial", None)
    if initial is not None and name in initial:
        initial[name] = value


def end_the_call(trainer: Trainer) -> BaseException:
    """Return the error that ends a call of the Trainer in good order before its loop has run, as its own tuners do.

    `trainer.should_stop` is reset when fit begins, and would still run the sanity check.
    """
    kinds = twins(_TunerExitException)
    error: BaseException = kinds[0 if isinstance(trainer, Trainer) else -1]()
    return error


def is_compiled_by_lightning(module: LightningModule) -> bool:
    """Return True if the module is the one that the Trainer unpacked from `torch.compile(module)`.

    The Trainer passes on the plain module with the compiled call inside, and only this attribute tells. It can go when
    Lightning has a public way to ask.
    """
    return getattr(module, "_compiler_ctx", None) is not None


def state_key_of(callback: Callback, **arguments: Any) -> str:
    """Return a key for the callback's state in a checkpoint that differs for different arguments.

    Lightning offers this to callbacks, under a private name only. It can go when that name is public.
    """
    return callback._generate_state_key(**arguments)


@dataclass(frozen=True, slots=True)
class StepClosure:
    """The parts of the closure that Lightning runs for a training batch.

    Attributes:
        batch: The batch.
        forward: Runs training_step on a batch and returns Lightning's result, with `closure_loss` and `extra`.
        log: The values that the step logs.
        backward: Sends a loss backward.
        zero_grad: Takes the gradients away; None where they are accumulated.
        skipped: Returns the result of a training_step that returned None.
    """

    batch: Any
    forward: Callable[[Any], Any]
    log: LoggedValues
    backward: Callable[[Tensor], None]
    zero_grad: Callable[[], None] | None
    skipped: Callable[[], Any]


def replace_closures(trainer: Trainer, run: Callable[[StepClosure], Any]) -> Callable[[], None]:
    """Make Lightning call `run` for each training batch's forward and backward; return a function that undoes this.

    No hook encloses both, and only their closure can be run again within the batch. It can go when the Trainer offers
    its closure to callbacks.
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
            kwargs["batch"],
            forward,
            LoggedValues(trainer),
            closure._backward_fn,
            closure._zero_grad_fn,
            partial(loop.output_result_cls, None),
        )

        def with_gradients(*_args: Any, **_options: Any) -> Any:
            with torch.enable_grad():
                return run(step)

        closure.closure = with_gradients
        return closure

    return _MethodWithAddition(loop, "_make_closure", around=made).undo


class LoggedValues:
    """The values that training has from `self.log`, which offers no way to take one back. It can go when that does."""

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = trainer.fit_loop._results

    def save(self) -> Callable[[], None]:
        """Return the function that takes back what is logged from now on."""
        results = self._results
        saved = {key: (metric, dict(vars(metric))) for key, metric in results.items()}
        batch, size = results.batch, results.batch_size

        def restore() -> None:
            for key in [key for key in results if key not in saved]:
                del results[key]
            for metric, values in saved.values():
                vars(metric).clear()
                vars(metric).update(values)
            results.batch, results.batch_size = batch, size

        return restore

    @contextmanager
    def of_part(self, part: Any) -> Iterator[None]:
        """Inside, logged values have the batch size of a part, so that the means of an epoch weight it rightly."""
        results = self._results
        whole, results.batch, results.batch_size = results.batch, part, None
        try:
            yield
        finally:
            results.batch, results.batch_size = whole, None


def twin_of(module: object) -> str | None:
    """Return the package whose LightningModule this is: "lightning.pytorch", or "pytorch_lightning"; else None."""
    for kind in twins(LightningModule):
        if isinstance(module, kind):
            return kind.__module__.partition(".core")[0]
    return None


STEP_NAMES = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
# By stage: Lightning's names of the function and of the stage, and the argument that takes the loaders.
_STAGES = {
    "train": ("fit", "train", "train_dataloaders"),
    "val": ("validate", "validate", "val_dataloaders"),
    "test": ("test", "test", "test_dataloaders"),
    "predict": ("predict", "predict", "predict_dataloaders"),
}


class StepLoop:
    """The loops of a Trainer, run batch by batch without a call of `fit` or `validate`.

    `Trainer.fit` also prepares data, calls `setup`, restores checkpoints and takes over signals, and nothing public
    runs its loops without that. It can go when the loops are public.

    Args:
        module: The LightningModule.
        stage: train, val, test or predict.
        batches: Yields the batches.
        original: The Trainer of the run that a step is taken from. Hooks at the start of a fit have run there.
        n_batches: The number of batches that the Trainer believes an epoch has.
        precision: The precision, by its name or as a plugin.
        device: The type of the device.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.
        on_phase: Called with the name of a phase that begins.
        run_step: Called with a function that runs the step as Lightning does; returns its result.
        place: Called with a batch and a function that moves it to the device; returns the moved batch.
        callbacks: Callbacks of the Trainer.
        set_up: Puts the model on the device, and returns the module that a step calls.
        facts: Of a replay: what the Trainer says of itself, by the names of its attributes.
    """

    def __init__(
        self,
        module: Any,
        stage: Literal["train", "val", "test", "predict"],
        batches: Iterator[Any],
        *,
        original: Any,
        n_batches: int,
        precision: Any,
        device: str | torch.device,
        accumulate: int,
        clip: float | None,
        on_phase: Callable[[str], None],
        run_step: Callable[[Callable[[], Any]], Any],
        place: Callable[[Any, Callable[[Any], Any]], Any],
        callbacks: Sequence[Callback],
        set_up: Callable[[], Any] | None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        package = twin_of(module)
        assert package is not None
        self._stage = stage
        self._module = module
        self._on_phase = on_phase
        self._run_step = run_step
        self.trainer: Any = _trainer_of(
            package,
            original,
            callbacks=[_PhaseHooks(on_phase), *callbacks],
            precision=precision,
            device=device,
            n_batches=n_batches,
            accumulate=accumulate,
            clip=clip,
        )
        self._strategy: Any = self.trainer.strategy
        self._name = STEP_NAMES[stage]
        self._loader = _Batches(batches, n_batches)
        if original is None:
            self.trainer._facts = facts
        self._connect(place, set_up)
        if original is not None:
            self._count_as(original)
            self.set_schedulers(original.lr_scheduler_configs)
        if stage == "train":
            self._begin_training(runs_hooks=original is None and facts is None)
        self.trainer._facts = facts

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers; without any, a stand-in of Lightning's that does nothing."""
        return list(self._strategy.optimizers)

    def set_schedulers(self, configs: Sequence[Any]) -> None:
        """Show these learning rate schedulers to the step; when it calls their `step()`, nothing happens."""
        self._strategy.lr_scheduler_configs = [
            replace(one, scheduler=_IdleScheduler(one.scheduler), reduce_on_plateau=False) for one in configs
        ]

    def _connect(self, place: Callable[..., Any], set_up: Callable[[], Any] | None) -> None:
        trainer, strategy, module = self.trainer, self._strategy, self._module
        function, running, loaders = _STAGES[self._stage]
        states = importlib.import_module(f"{twin_of(module)}.trainer.states")
        trainer.state.fn, trainer.state.stage = states.TrainerFn(function), states.RunningStage(running)
        strategy.connect(module)
        trainer._data_connector.attach_data(module, **{loaders: self._loader})
        trainer._logger_connector.log_metrics = lambda *_args, **_kwargs: None
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        move, step, plugin = strategy.batch_to_device, getattr(strategy, self._name), strategy.precision_plugin
        # Fake tensors have the type of the precision, and lie on the device.
        strategy.model_to_device = lambda: None
        plugin.convert_module = lambda model: model
        if set_up is not None:
            strategy._setup_model = lambda _model: set_up()
        strategy.batch_to_device = lambda batch, *args, **kwargs: place(batch, lambda one: move(one, *args, **kwargs))
        setattr(strategy, self._name, lambda *args: self._run_step(lambda: step(*args)))
        plugin._clip_gradients = partial(self._clip_gradients, plugin._clip_gradients)
        strategy.setup(trainer)
        if not module.automatic_optimization:
            for optimizer in strategy.optimizers:
                optimizer.register_step_post_hook(lambda *_: self._on_phase("forward"))

    def _clip_gradients(self, clip: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.trainer.gradient_clip_val is not None:
            self._on_phase("clip")
        clip(*args, **kwargs)
        self._on_phase("optimizer")

    def _count_as(self, original: Any) -> None:
        """Set the Trainer's counters to those of another."""
        loop, other = self.trainer.fit_loop, original.fit_loop
        loop.epoch_progress.current.processed = other.epoch_progress.current.processed
        loop.epoch_loop._batches_that_stepped = other.epoch_loop._batches_that_stepped
        steps, others = loop.epoch_loop, other.epoch_loop
        steps.automatic_optimization.optim_progress.optimizer.step.total.completed = (
            others.automatic_optimization.optim_progress.optimizer.step.total.completed
        )
        steps.manual_optimization.optim_step_progress.total.completed = (
            others.manual_optimization.optim_step_progress.total.completed
        )

    def _begin_training(self, *, runs_hooks: bool) -> None:
        loop = self.trainer.fit_loop
        loop.min_epochs, loop.max_epochs = 0, 1
        loop.setup_data()
        loop.reset()
        for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start") if runs_hooks else ():
            _call_lightning_module_hook(self.trainer, hook)
        loop.epoch_loop.reset()
        loop.epoch_loop.on_run_start(loop._data_fetcher)

    def run_batch(self, index: int | None = None) -> None:
        """Run one training batch, of this index in its epoch if one is given."""
        self.advance(index)
        self.trainer.fit_loop.epoch_loop.on_advance_end(self.trainer.fit_loop._data_fetcher)

    def advance(self, index: int | None) -> None:
        """Run one training batch, without what follows it: validation and counters of steps."""
        loop = self.trainer.fit_loop
        if index is not None:
            progress = loop.epoch_loop.batch_progress
            progress.current.ready = progress.current.completed = index
        loop.epoch_loop.advance(loop._data_fetcher)

    def run_forward(self, batch: Any, index: int) -> Any:
        """Run the forward pass of a batch on the device alone."""
        loop = self.trainer.fit_loop.epoch_loop
        arguments = loop._build_kwargs({}, batch, index)
        return getattr(self._strategy, self._name)(*arguments.values())

    def evaluate(self, n_batches: int) -> None:
        """Run this many batches of the stage, and the hooks of its beginning and end."""
        self._loader.length = n_batches
        trainer = self.trainer
        trainer.predict_loop.return_predictions = False  # they are kept on the host
        trainer.validate_loop.verbose = trainer.test_loop.verbose = False
        loops = {
            "val": self.trainer.validate_loop,
            "test": self.trainer.test_loop,
            "predict": self.trainer.predict_loop,
        }
        loops[self._stage].run()


class _StepEndsError(BaseException):
    """Raised just before the optimizer's update, to leave a training step. `except Exception` does not catch it."""


class _NoUpdateError(BaseException):
    """Raised inside an optimizer's step, to leave it before it updates anything."""


class ReplayLoop:
    """Reruns the batches of one training step in Lightning's loop, and stops before the optimizer's update.

    Nothing is logged. The batches have been on the device before, so that no hook moves or changes them again. The
    Trainer that the step sees has the counters and settings that are given as facts, and everything else of the run's
    Trainer: its metrics, its data module, its callbacks (whose hooks are not called). Nothing public ends a step before
    its update.

    Args:
        module: The LightningModule. Its attributes change: the caller restores them, or calls `detach`.
        original: The Trainer of the run; None for a step from a file.
        facts: What the Trainer says of itself, by the names of its attributes.
        optimizers: The optimizers; None to configure them.
        schedulers: Lightning's configurations of the schedulers.
        accumulate: The number that losses are divided by.
        scale: The number that the gradient scaler multiplies losses by; None without one.
        forward: Makes the context that training_step runs in.
        on_loss: Called with each loss that is sent backward, multiplied by the scaler.
        before_update: Called before each update of training_step; returns whether the step ends there. No update is
            made.
    """

    def __init__(
        self,
        module: Any,
        *,
        original: Any,
        facts: Mapping[str, Any],
        optimizers: Sequence[Any] | None,
        schedulers: Sequence[Any] = (),
        accumulate: int = 1,
        scale: float | None = None,
        forward: Callable[[], Any] = nullcontext,
        on_loss: Callable[[Tensor], None] = lambda _loss: None,
        before_update: Callable[[], bool] = lambda: True,
    ) -> None:
        self._module, self._trainer_before = module, module._trainer
        device = next((each.device for each in module.parameters()), torch.device("cpu"))
        self._scale = scale
        self._plugin = _precision_of_replay(f"{twin_of(module)}.plugins", device.type, scale, forward)
        self._batch: Any = None
        vars(module).update({"print": _print_nothing, "_on_before_batch_transfer": _same_batch})
        if optimizers is not None:
            vars(module)["configure_optimizers"] = lambda: list(optimizers) or None
        self._loop = StepLoop(
            module, "train", self._batches(), original=original, n_batches=1000, precision=self._plugin, device=device,
            accumulate=accumulate, clip=None, on_phase=lambda _phase: None, run_step=lambda own: own(),
            place=lambda batch, _move: batch, callbacks=[_ReplayHooks(on_loss, before_update)], set_up=None,
            facts=facts,
        )  # fmt: skip
        trainer, strategy = self._loop.trainer, self._loop.trainer.strategy
        if original is None:
            self.schedulers = strategy.lr_scheduler_configs if optimizers is None else schedulers
            self._loop.set_schedulers(self.schedulers)
        else:
            trainer.callbacks += [_SilentCallback(one) for one in callbacks_of(original)]
            trainer.loggers = trainer.loggers if original.loggers else []
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        update = strategy.optimizer_step
        strategy.optimizer_step = lambda *args, **kwargs: self._without_update(update, *args, **kwargs)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return self._loop.optimizers

    def detach(self) -> None:
        """Give the module its own Trainer and methods back, where its optimizers were configured."""
        self._module.trainer = self._trainer_before
        del vars(self._module)["print"], vars(self._module)["_on_before_batch_transfer"]

    def run(self, batch: Any, index: int, *, is_last: bool) -> bool:
        """Run a batch; return whether the step ended within it.

        Args:
            batch: The batch.
            index: Its index in the epoch.
            is_last: Whether it is the last batch of the step.
        """
        self._batch = batch
        self._loop.trainer.fit_loop._should_accumulate = lambda: not is_last
        try:
            self._loop.advance(index)
        except _StepEndsError:
            return True
        except StopIteration:  # a hook said that the rest of the epoch is to be left out
            return False
        return False

    def _batches(self) -> Iterator[Any]:
        while True:
            yield self._batch

    def _without_update(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except _NoUpdateError:
            if self._scale is not None:
                self._plugin.scaler.update(self._scale)  # it refuses to unscale twice
            return None


def _precision_of_replay(plugins: str, device: str, scale: float | None, forward: Callable[[], Any]) -> Any:
    """Return a precision plugin by the conditions of a step, which a file has too."""
    module = importlib.import_module(plugins)
    if scale is None:
        plugin = module.Precision()
    else:
        plugin = module.MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=scale))
    plugin.forward_context = forward
    plugin.convert_input = _same_batch
    return plugin


class _ReplayHooks(Callback):
    """Tells of losses, and ends a step before its update."""

    def __init__(self, on_loss: Callable[[Tensor], None], before_update: Callable[[], bool]) -> None:
        self._on_loss, self._before_update = on_loss, before_update

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        del trainer, pl_module
        self._on_loss(loss)

    def on_before_optimizer_step(self, *_: Any) -> None:
        raise (_StepEndsError if self._before_update() else _NoUpdateError)


class _SilentCallback:
    """A callback of the run as user's code in a replay finds it; Lightning calls none of its hooks."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance finds it
        return type(self._callback)

    def __getattr__(self, name: str) -> Any:
        return None if name.startswith("on_") else getattr(self._callback, name)


def _print_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, in place of LightningModule.print."""


def _same_batch(batch: Any, **_: Any) -> Any:
    """Return the batch, on which the hooks have run before."""
    return batch


class _Batches:
    """A loader of batches that are made one by one, with a length of its own."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches = batches
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return self.length


class _IdleScheduler:
    """A learning rate scheduler whose step does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _PhaseHooks(Callback):
    """Says when a phase of a step begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._on_phase = on_phase

    def on_before_backward(self, *_: Any) -> None:
        """Backward begins."""
        self._on_phase("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """In manual optimization, training_step goes on."""
        del trainer
        if not pl_module.automatic_optimization:
            self._on_phase("forward")

    def on_validation_batch_end(self, *_: Any, **_named: Any) -> None:
        """The outputs are freed next."""
        self._on_phase("outputs")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


# The attributes of a Trainer that its loop works with.
_OF_LOOP = frozenset({
    "accelerator", "accumulate_grad_batches", "callbacks", "evaluating", "fit_loop", "lightning_module", "logger",
    "loggers", "lr_scheduler_configs", "model", "optimizers", "precision_plugin", "predict_loop", "predicting",
    "profiler", "received_sigterm", "sanity_checking", "state", "strategy", "test_loop", "testing", "training",
    "validate_loop", "validating",
})  # fmt: skip


def _trainer_of(
    package: str,
    original: Any,
    *,
    callbacks: Sequence[Callback],
    precision: Any,
    device: str | torch.device,
    n_batches: int,
    accumulate: int,
    clip: float | None,
) -> Any:
    """Return a Trainer that logs and saves nothing; attributes that it lacks are read from `original`."""
    lightning, plugins, environments, strategies, loggers = (
        importlib.import_module(package + name)
        for name in ("", ".plugins", ".plugins.environments", ".strategies", ".loggers.logger")
    )
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if precision == "32-true":
        precision = plugins.Precision()
    elif precision in {"bf16-true", "16-true"}:
        precision = plugins.HalfPrecision(precision)
    elif isinstance(precision, str):
        scaler = torch.amp.GradScaler(place.type) if precision == "16-mixed" else None
        precision = plugins.MixedPrecision(precision, place.type, scaler)

    class StepTrainer(lightning.Trainer):  # type: ignore[misc, name-defined]
        """A Trainer that reads the attributes it lacks from another; in a replay all but those of its loop."""

        _facts: Mapping[str, Any] | None = None

        def __getattribute__(self, name: str) -> Any:
            own = super().__getattribute__
            facts = None if name.startswith("_") or name in _OF_LOOP else own("_facts")
            if facts is None:
                return own(name)
            if name in facts:
                return facts[name]
            return own(name) if original is None else getattr(original, name)

        def __getattr__(self, name: str) -> Any:
            if original is None or name.startswith("__"):
                raise AttributeError(f"'Trainer' object has no attribute {name!r}")
            return getattr(original, name)

    trainer = StepTrainer(
        accelerator=place.type,
        devices=1,
        strategy=strategies.SingleDeviceStrategy(place),
        plugins=[precision, environments.LightningEnvironment()],
        max_epochs=1,
        limit_train_batches=n_batches,
        limit_val_batches=n_batches,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        gradient_clip_algorithm=None if original is None else original.gradient_clip_algorithm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # a dispatch mode does not see all operators in it
        use_distributed_sampler=False,
    )
    trainer.loggers = [loggers.DummyLogger()]
    trainer.callbacks = list(callbacks)  # and none that an entry point or a patched Trainer adds
    if original is not None:
        trainer.datamodule = original.datamodule
    return trainer
