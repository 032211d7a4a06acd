"""The loops of a Lightning Trainer, run batch by batch without a call of `fit` or `validate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from lightning_memtools._lightning import (
    Callback,
    Trainer,
    attach,
    begin_training,
    count_as,
    part_of_lightning,
    step_arguments,
    watch_updates,
)

STEP_NAMES = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
# What Lightning's Trainer is told of an epoch's length: schedules over it and warm-ups work as in a long training.
BATCHES_OF_EPOCH = 1000


class LoopOwner(Protocol):
    """The object for which a StepLoop runs steps."""

    def begin(self, phase: str) -> None:
        """Called when a phase begins: backward, clip, optimizer, outputs, or forward after an update by hand."""

    def run_step(self, own: Callable[[], Any]) -> Any:
        """Run the step as Lightning does, with `own`, and return its result."""

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return the batch on the device; `move` is Lightning's way to get it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of the Trainer whose loops run.

    Attributes:
        stage: train, val, test or predict.
        device: The type of the device, or a device with its index.
        precision: The precision plugin.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.
        callbacks: Callbacks of the Trainer.
        original: The Trainer of the run that a step is taken from. Hooks at the start of a fit have run there.
        facts: Of a replay: what the Trainer says of itself, by the names of its attributes.
    """

    stage: Literal["train", "val", "test", "predict"]
    device: str
    precision: Any
    accumulate: int = 1
    clip: float | None = None
    callbacks: Sequence[Callback] = ()
    original: Any = None
    facts: Mapping[str, Any] | None = None


class StepLoop:
    """Runs a module's steps in the loops of a Trainer that logs and saves nothing.

    `Trainer.fit` also prepares data, calls `setup`, restores checkpoints and takes over signals.

    Args:
        module: The LightningModule.
        batches: Yields the batches.
        owner: The object for which the steps are run.
        settings: The settings of the Trainer.
        set_up: Puts the model on the device, and returns the module that a step calls. By default it is there.
    """

    def __init__(
        self,
        module: Any,
        batches: Iterator[Any],
        owner: LoopOwner,
        settings: LoopSettings,
        set_up: Callable[[], Any] | None = None,
    ) -> None:
        original, facts = settings.original, settings.facts
        self.trainer: Any = _trainer_of(settings, [_PhaseHooks(owner), *settings.callbacks])
        self._stage, self._name = settings.stage, STEP_NAMES[settings.stage]
        self._loader = _Batches(batches)
        strategy, plugin = self.trainer.strategy, self.trainer.precision_plugin
        if original is None:
            self.trainer.facts = facts
        attach(self.trainer, module, settings.stage, self._loader)
        move, step = strategy.batch_to_device, getattr(strategy, self._name)
        # Fake tensors have the type of the precision, and lie on the device.
        strategy.model_to_device = lambda: None
        plugin.convert_module = lambda model: model if set_up is None else set_up()
        strategy.batch_to_device = lambda batch, *args, **options: owner.place(
            batch, lambda given: move(given, *args, **options)
        )
        setattr(strategy, self._name, lambda *args: owner.run_step(lambda: step(*args)))
        watch_updates(self.trainer, lambda _optimizer: owner.begin("optimizer"))
        strategy.setup(self.trainer)
        if not module.automatic_optimization:
            for optimizer in strategy.optimizers:
                optimizer.register_step_post_hook(lambda *_: owner.begin("forward"))
        if original is not None:
            count_as(self.trainer, original)
            self.set_schedulers(original.lr_scheduler_configs)
        if settings.stage == "train":
            self._fetcher = begin_training(self.trainer, runs_hooks=original is None and facts is None)
        self.trainer.facts = facts

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers; without any, a stand-in of Lightning's that does nothing."""
        return list(self.trainer.strategy.optimizers)

    def set_schedulers(self, configs: Sequence[Any]) -> None:
        """Show these learning rate schedulers to the step; when it calls their `step()`, nothing happens."""
        self.trainer.strategy.lr_scheduler_configs = [
            replace(config, scheduler=_IdleScheduler(config.scheduler), reduce_on_plateau=False) for config in configs
        ]

    def run_batch(self, index: int | None = None) -> None:
        """Run one training batch, of this index in its epoch if one is given."""
        self.advance(index)
        self.trainer.fit_loop.epoch_loop.on_advance_end(self._fetcher)

    def advance(self, index: int | None) -> None:
        """Run one training batch, without what follows it: validation and counters of steps."""
        loop = self.trainer.fit_loop.epoch_loop
        if index is not None:
            loop.batch_progress.current.ready = loop.batch_progress.current.completed = index
        loop.advance(self._fetcher)

    def run_forward(self, batch: Any, index: int) -> Any:
        """Run the forward pass of a batch on the device alone."""
        return getattr(self.trainer.strategy, self._name)(*step_arguments(self.trainer, batch, index))

    def evaluate(self, n_batches: int) -> None:
        """Run this many batches of the stage, and the hooks of its beginning and end."""
        self._loader.length = n_batches
        validate, test, predict = self.trainer.validate_loop, self.trainer.test_loop, self.trainer.predict_loop
        predict.return_predictions = False  # they are kept on the host
        validate.verbose = test.verbose = False
        {"val": validate, "test": test, "predict": predict}[self._stage].run()


def precision_plugin(name: str, device: str) -> Any:
    """Return the plugin of a precision with this name on a device of this type."""
    plugins = part_of_lightning("plugins")
    if name == "32-true":
        return plugins.Precision()
    if name.endswith("-true"):
        return plugins.HalfPrecision(name)
    return plugins.MixedPrecision(name, device, torch.amp.GradScaler(device) if name == "16-mixed" else None)


class _Batches:
    """A loader of batches that are made one by one, with a length of its own."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.length = batches, BATCHES_OF_EPOCH

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return self.length


class _IdleScheduler:
    """A learning rate scheduler whose step does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *_args: Any, **_options: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _PhaseHooks(Callback):
    """Says when a phase of a step begins."""

    def __init__(self, owner: LoopOwner) -> None:
        self._owner = owner

    def on_before_backward(self, *_: Any) -> None:
        """Backward begins."""
        self._owner.begin("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """In manual optimization, training_step goes on."""
        del trainer
        if not pl_module.automatic_optimization:
            self._owner.begin("forward")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        """Clipping begins, where gradients are clipped."""
        if trainer.gradient_clip_val is not None:
            self._owner.begin("clip")

    def on_validation_batch_end(self, *_: Any, **_named: Any) -> None:
        """The outputs are freed next."""
        self._owner.begin("outputs")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


# The attributes of a Trainer that its loop works with.
_OF_LOOP = frozenset({
    "accelerator", "accumulate_grad_batches", "callbacks", "evaluating", "facts", "fit_loop", "lightning_module",
    "logger", "loggers", "lr_scheduler_configs", "model", "optimizers", "original", "precision_plugin", "predict_loop",
    "predicting", "profiler", "received_sigterm", "sanity_checking", "state", "strategy", "test_loop", "testing",
    "training", "validate_loop", "validating",
})  # fmt: skip


class _StepTrainer(Trainer):
    """A Trainer that reads the attributes it lacks from `original`; in a replay all but those of its loop."""

    facts: Mapping[str, Any] | None = None
    original: Any = None

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        facts = None if name.startswith("_") or name in _OF_LOOP else own("facts")
        if facts is None:
            return own(name)
        if name in facts:
            return facts[name]
        return own(name) if self.original is None else getattr(self.original, name)

    def __getattr__(self, name: str) -> Any:
        if self.original is None or name.startswith("__"):
            raise AttributeError(f"'Trainer' object has no attribute {name!r}")
        return getattr(self.original, name)


def _trainer_of(settings: LoopSettings, callbacks: Sequence[Callback]) -> Any:
    """Return a Trainer that logs and saves nothing."""
    strategies, environments, loggers = map(part_of_lightning, ("strategies", "plugins.environments", "loggers.logger"))
    device, original = settings.device, settings.original
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    trainer: Any = _StepTrainer(
        accelerator=place.type,
        devices=1,
        strategy=strategies.SingleDeviceStrategy(place),
        plugins=[settings.precision, environments.LightningEnvironment()],
        max_epochs=1,
        limit_train_batches=BATCHES_OF_EPOCH,
        limit_val_batches=BATCHES_OF_EPOCH,
        num_sanity_val_steps=0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip,
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
        trainer.original, trainer.datamodule = original, original.datamodule
    return trainer
