"""Runs training or evaluation steps with Lightning's own loops, without the user's Trainer, loaders and loggers.

Lightning decides what a step's memory depends on: when gradients are zeroed, what autocast keeps, how many batches are
alive, what toggled optimizers leave out, what `self.log` keeps. The loops run on fake tensors that stand for a GPU's,
or on PyTorch's CUDA code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._lightning import (
    Callback,
    LightningModule,
    attach,
    begin_training,
    count_as,
    part_of_lightning,
    refuse_other_package,
    watch_updates,
)
from lightning_memtools.memory.nested_tensors import map_tensors
from lightning_memtools.simulation.known_values import note_values
from lightning_memtools.simulation.step_trainer import EndlessLoader, PhaseHooks, StepTrainer, precision_plugin, quiet

Stage = Literal["train", "val", "test", "predict"]
PrecisionName = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]
_TRUE_PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}

STEP_NAMES = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
StepFunction = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the Trainer that a StepRunner creates to run steps.

    Attributes:
        stage: "train", or a stage without gradients: "val", "test" or "predict".
        precision: The precision, as one of Lightning's names or plugins; None for the precision of the Trainer that
            was passed to the StepRunner.
        steps: The number of optimizer steps; in a stage without gradients, the number of batches.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.
    """

    stage: Stage = "train"
    precision: Any = "32-true"
    steps: int = 2
    accumulate: int = 1
    clip: float | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to convert the model's floating-point tensors to; None to leave them as they are."""
        return _TRUE_PRECISIONS.get(self.precision)


class StepListener:
    """Provides the batches of a run, and is notified when a phase of a step begins. This base class has no batches."""

    def begin(self, phase: str, step: int | None = None) -> None:
        """Called when a phase of a step begins: "inputs", "forward", "backward", "clip" or "optimizer"."""

    def next_batch(self) -> Any:
        """Return the next batch, in host memory."""
        return None

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Move the batch to the device by calling `move`, as Lightning does, and return it."""
        return move(batch)

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Called once with the optimizers, before the first step."""


class StepRunner:
    """Runs the steps of a module in the loops of a new Lightning Trainer, which is created for the purpose.

    The module's attributes are changed; the caller has to restore them (see `fakes.borrowed`). `prepare_data`,
    `setup`, and hooks at the end of an epoch or a fit do not run.

    Args:
        module: A LightningModule, or any other module if `step` is given.
        recipe: The settings of the Trainer.
        listener: Provides the batches, and is called when a phase begins.
        device: The device, such as "cuda:0" to run PyTorch's CUDA code, or "cpu" to run fake tensors.
        step: Computes the loss of a batch, in place of the module's own step.
        make_optimizer: Makes the optimizer, in place of ``configure_optimizers``. If None, a module that is not a
            LightningModule trains without an optimizer.
        trainer: The Trainer of a run whose step is repeated. The new Trainer uses its counters, precision, clipping,
            data module, and other attributes.
        callbacks: Callbacks for the new Trainer.
        replay: For a saved step: the values of the Trainer's attributes. Hooks at the start of a fit do not run then.
        hooks: False to run only `step` and `make_optimizer`, and no hook of a LightningModule.

    Attributes:
        module: The LightningModule whose steps run.
        trainer: The new Trainer.
        around_step: Returns a context manager, within which one step runs.
        n_losses: The number of training steps that have returned a loss.
    """

    def __init__(
        self,
        module: Any,
        recipe: Recipe,
        listener: StepListener,
        *,
        device: str = "cpu",
        step: StepFunction | None = None,
        make_optimizer: MakeOptimizer | None = None,
        trainer: Any = None,
        callbacks: Sequence[Callback] = (),
        replay: Mapping[str, Any] | None = None,
        hooks: bool = True,
    ) -> None:
        self._recipe, self._listener = recipe, listener
        if make_optimizer is None and trainer is not None:
            make_optimizer = lambda _parameters: None  # noqa: E731
        if hooks and is_lightning_module(module):
            self.module: Any = _with_step(module, recipe.stage, step, make_optimizer)
        else:
            assert step is not None
            self.module = PlainModule(module, step, make_optimizer)
        self.around_step: Callable[[], Any] = nullcontext
        self.n_losses = 0
        self._n_batches = 0
        precision = recipe.precision or _precision_like(trainer, device)
        if isinstance(precision, str):
            precision = precision_plugin(precision, device)
        with quiet():
            self.trainer: Any = StepTrainer(trainer, device, precision, accumulate=recipe.accumulate, clip=recipe.clip)
            self.trainer.callbacks = [PhaseHooks(listener.begin), *callbacks]  # none that an entry point adds
            if trainer is None:
                self.trainer.facts = replay
            self._loader = EndlessLoader(self._batches())
            attach(self.trainer, self.module, recipe.stage, self._loader)
            self._put_in_place()
            if trainer is not None:
                count_as(self.trainer, trainer)
                self.set_schedulers(trainer.lr_scheduler_configs)
            if recipe.stage == "train":
                self._fetcher = begin_training(self.trainer, runs_hooks=trainer is None and replay is None)
            self.trainer.facts = replay
            if recipe.stage == "train" and replay is None:
                if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
                    raise ValueError("LBFGS is not estimated: its values decide how often it computes the loss.")
                listener.on_optimizers(self.optimizers)

    def _put_in_place(self) -> None:
        """Set up the Trainer's strategy to call the listener at each step, and to let it move each batch."""
        strategy, plugin = self.trainer.strategy, self.trainer.precision_plugin
        name, begin, place = STEP_NAMES[self._recipe.stage], self._listener.begin, self._listener.place
        move, step = strategy.batch_to_device, getattr(strategy, name)
        # Fake tensors have the type of the precision, and lie on the device.
        strategy.model_to_device = lambda: None
        plugin.convert_module = lambda model: model
        strategy.batch_to_device = lambda batch, *args, **options: place(
            batch, lambda given: move(given, *args, **options)
        )
        setattr(strategy, name, lambda *args: self._run_step(lambda: step(*args)))
        watch_updates(self.trainer, lambda _optimizer: begin("optimizer"))
        strategy.setup(self.trainer)
        if not self.is_automatic:
            for optimizer in strategy.optimizers:
                optimizer.register_step_post_hook(lambda *_: begin("forward"))

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers. If there are none, Lightning's placeholder, an optimizer that does nothing."""
        return [*self.trainer.strategy.optimizers, *getattr(self.module, "others", ())]

    def set_schedulers(self, configs: Sequence[Any]) -> None:
        """Make these learning rate schedulers visible to the training step. Calling their `step()` does nothing."""
        self.trainer.strategy.lr_scheduler_configs = []
        for config in configs:
            scheduler = copy.copy(config.scheduler)
            vars(scheduler)["step"] = lambda *_args, **_options: None
            idle = replace(config, scheduler=scheduler, reduce_on_plateau=False)
            self.trainer.strategy.lr_scheduler_configs.append(idle)

    def run(self) -> None:
        """Train for as many steps as the recipe (the settings) says; in other stages, run the loop of that stage once.

        Raises:
            TypeError: A training step returned no loss.
        """
        recipe, trainer = self._recipe, self.trainer
        if recipe.stage == "train":
            for _ in range(recipe.steps * recipe.accumulate):
                self.run_batch()
            return
        self._loader.length = recipe.steps
        trainer.predict_loop.return_predictions = False  # they are kept on the host
        trainer.validate_loop.verbose = trainer.test_loop.verbose = False
        loops = {"val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
        with quiet():
            loops[recipe.stage].run()

    def run_batch(self, index: int | None = None) -> None:
        """Run one training batch. `index` is its index in the epoch; None for the index after the previous one."""
        with quiet():
            self.advance(index)
            self.trainer.fit_loop.epoch_loop.on_advance_end(self._fetcher)

    def advance(self, index: int | None) -> None:
        """Run one training batch. Do not run a validation that may follow, and do not count the batch as a step."""
        loop = self.trainer.fit_loop.epoch_loop
        if index is not None:
            loop.batch_progress.current.ready = loop.batch_progress.current.completed = index
        loop.advance(self._fetcher)

    @property
    def is_automatic(self) -> bool:
        """True if the module uses automatic optimization."""
        return bool(self.module.automatic_optimization)

    def _batches(self) -> Iterator[Any]:
        while True:
            per_step = self._recipe.accumulate if self.is_automatic else 1
            self._listener.begin("inputs", self._n_batches // per_step)
            self._n_batches += 1
            yield self._listener.next_batch()

    def _run_step(self, own: Callable[[], Any]) -> Any:
        self._listener.begin("forward")
        with self.around_step():
            out = own()
        if self._recipe.stage == "train" and self.is_automatic:
            self.n_losses += _has_loss(out)
        return out


def _with_step(module: Any, stage: Stage, step: StepFunction | None, make: MakeOptimizer | None) -> Any:
    """Give a LightningModule this step (for `stage`) and optimizer, and return it. What is None stays its own."""
    if make is not None:
        vars(module)["configure_optimizers"] = lambda: make(list(module.parameters()))
    if step is not None:
        vars(module)[STEP_NAMES[stage]] = lambda batch, batch_idx=0: step(module, batch)  # noqa: ARG005, Lightning's
        module.automatic_optimization = True
    for part in module.modules():
        if is_lightning_module(part):
            vars(part)["print"] = lambda *_args, **_options: None
    return module


class PlainModule(LightningModule):
    """Wraps any module, together with a function that computes its loss, as a LightningModule.

    Attributes:
        others: All optimizers but the first, if `make_optimizer` returns a list. They step after the first.
    """

    def __init__(self, model: nn.Module, step: StepFunction, make_optimizer: MakeOptimizer | None) -> None:
        super().__init__()
        self.model = model
        self._step, self._make_optimizer = step, make_optimizer
        self.others: Sequence[Optimizer] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the step function on the batch, and return its result."""
        del batch_idx
        return self._step(self.model, batch)

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> Any:
        """Make the optimizers. Return the first one, and keep the rest in `others`."""
        if self._make_optimizer is None:
            return None
        made = self._make_optimizer(list(self.model.parameters()))
        first, *self.others = made if isinstance(made, list) else [made]
        return first

    def forget(self) -> None:
        """Release the module and the step function. Otherwise, a reference cycle with the Trainer keeps them alive."""
        self.model, self._step = nn.Identity(), lambda *_: None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients of all optimizers' parameters; without an optimizer, those of the whole model."""
        del epoch, batch_idx
        for one in (self.model if self._make_optimizer is None else optimizer, *self.others):
            one.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step all optimizers; if there are none, only run the closure."""
        if self._make_optimizer is not None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        elif optimizer_closure is not None:
            optimizer_closure()
        for one in self.others:
            self.trainer.strategy.optimizer_step(one, lambda: True, self)  # with the hooks of an update


def is_lightning_module(model: object) -> bool:
    """Return whether a model is a LightningModule. Raise if `lightning` and `pytorch_lightning` are mixed."""
    refuse_other_package(model)
    return isinstance(model, LightningModule)


def has_step(module: nn.Module, name: str) -> bool:
    """Return whether a LightningModule overrides the step `name`; True for "predict_step", which has a default."""
    return name == "predict_step" or part_of_lightning("utilities.model_helpers").is_overridden(name, module)


def copy_of_batch(batch: Any) -> Any:
    """Return an uninitialized copy of a batch on the CPU. Values that are known are known of the copy, too."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )
        note_values(made, tensor)
        return made

    return map_tensors(batch, copied)


def _has_loss(out: Any) -> bool:
    """Return whether a training step returned a loss; False if it returned None, which makes Lightning skip the step.

    Raises:
        TypeError: The result is neither None nor a loss.
    """
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if out is None:
        return False
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        what = "None" if loss is None else f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            what = f"a tensor of shape {list(loss.shape)} with requires_grad={loss.requires_grad}"
        raise TypeError(
            f"The step returned {what}. In training it has to return the loss: a tensor with one element that "
            "requires a gradient, or a dict with it under 'loss'. For a step without a loss use stage='val'."
        )
    return True


def _precision_like(trainer: Any, device: str) -> Any:
    """Return a copy of a Trainer's precision plugin, with a new scaler."""
    plugin = copy.copy(trainer.precision_plugin)
    if isinstance(getattr(plugin, "device", None), str):
        plugin.device = device
    if getattr(plugin, "scaler", None) is not None:
        plugin.scaler = torch.amp.GradScaler(device)
    return plugin
