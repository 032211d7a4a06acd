"""Loops that run training or evaluation steps in every precision, and say when each phase begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import unscale_gradients
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.attention_masks import note_values
from lightning_memtools.simulation.trainer_stand_in import (
    TrainerStandIn,
    accepted_arguments,
    attach,
    configured_optimizers,
)

Stage = Literal["train", "val", "test", "predict"]
STEP_NAMES = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
PrecisionName = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision by Lightning's name.

    Attributes:
        dtype: The type of parameters and floating-point inputs; None to leave them as they are.
        autocast: The type that autocast computes in; None for no autocast.
        scales: The loss is scaled (16-mixed).
        device: The device of autocast. The tensors that stand for CUDA's are on the CPU (see cuda_ops/autocast.py).
    """

    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scales: bool = False
    device: str = "cpu"

    @classmethod
    def parse(cls, name: str) -> Precision:
        """Return the precision with one of Lightning's names.

        Raises:
            ValueError: The precision cannot be estimated.
        """
        if name not in _KNOWN:
            raise ValueError(f"Unknown precision {name!r}. Accepted are {', '.join(map(repr, _KNOWN))}.")
        return _KNOWN[name]

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        if self.dtype is not None:
            return _default_dtype(self.dtype)
        return nullcontext() if self.autocast is None else torch.autocast(self.device, dtype=self.autocast)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give the tensors that a step creates this type too, as Lightning's HalfPrecision.forward_context does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_KNOWN = {
    "32-true": Precision(),
    "bf16-true": Precision(dtype=torch.bfloat16),
    "16-true": Precision(dtype=torch.float16),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-mixed": Precision(autocast=torch.float16, scales=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of the loop that runs the steps.

    Attributes:
        stage: train, or a stage without gradients.
        precision: The precision of parameters and computation.
        steps: The number of optimizer steps; in a stage without gradients, the number of batches.
        accumulate: The number of batches per optimizer step.
        clip: Gradients are clipped to this norm; None for no clipping.
        zero_grad: Gradients are freed before backward, as in Lightning, or after the optimizer's step.
    """

    stage: Stage = "train"
    precision: Precision
    steps: int = 2
    accumulate: int = 1
    clip: float | None = None
    zero_grad: Literal["before_backward", "after_step"] = "before_backward"


class LoopHooks(Protocol):
    """The hooks that the loops of this file call; `tracer.Tracer` implements them."""

    def begin(self, phase: str, step: int | None = None) -> None:
        """Called when a phase begins."""

    def next_batch(self) -> Any:
        """Return the next batch, on the device."""

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Called once with the optimizers, before the first step."""


StepFunction = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def run_module(
    model: nn.Module, step: StepFunction, make_optimizer: MakeOptimizer | None, recipe: Recipe, hooks: LoopHooks
) -> None:
    """Run the steps of any module.

    Args:
        model: The module.
        step: Computes the loss of a batch; in a stage without gradients its result is dropped.
        make_optimizer: Makes the optimizer of the parameters; None to train without one.
        recipe: The settings of the loop.
        hooks: Give the batches, and are called when a phase begins.
    """
    training = recipe.stage == "train"
    model.train(training)
    optimizers = [make_optimizer(list(model.parameters()))] if training and make_optimizer else []
    hooks.on_optimizers(optimizers)
    if training:
        _train(model, lambda batch, _index: step(model, batch), optimizers, recipe, hooks)
    else:
        _evaluate(lambda batch, _index: step(model, batch), recipe, hooks)


def run_lightning(
    module: Any, own_step: StepFunction | None, make_optimizer: MakeOptimizer | None, recipe: Recipe, hooks: LoopHooks
) -> None:
    """Run the steps of a LightningModule with automatic or manual optimization.

    Args:
        module: The LightningModule. Its attributes change: the caller restores them (see `fakes.borrowed`).
        own_step: The user's function that replaces the module's step; in training it returns the loss.
        make_optimizer: Makes the optimizer, in place of ``configure_optimizers``.
        recipe: The settings of the loop.
        hooks: Give the batches, and are called when a phase begins.
    """
    training = recipe.stage == "train"
    scaler = _Scaler() if recipe.precision.scales and training else None

    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        hooks.begin("backward")
        (scaler.scale(loss) if scaler else loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        hooks.begin("forward")

    trainer = TrainerStandIn(backward=backward, stage=recipe.stage)
    attach(module, trainer)
    module.train(training)
    if training:
        optimizers, schedulers = (
            ([make_optimizer(list(module.parameters()))], []) if make_optimizer else configured_optimizers(module)
        )
        trainer.use(optimizers, schedulers)
        hooks.on_optimizers(optimizers)
    step = getattr(module, STEP_NAMES[recipe.stage])

    def run_step(batch: Any, index: int) -> Any:
        if own_step is not None:
            return own_step(module, batch)
        return step(*accepted_arguments(step, batch, index))

    if not training:
        _evaluate(run_step, recipe, hooks)
    elif module.automatic_optimization or own_step is not None:
        _train(module, run_step, optimizers, recipe, hooks)
    else:
        _train_manually(run_step, optimizers, recipe, hooks)


def _train(
    model: nn.Module,
    loss_of: Callable[[Any, int], Any],
    optimizers: list[Optimizer],
    recipe: Recipe,
    hooks: LoopHooks,
) -> None:
    for optimizer in optimizers:
        _refuse_lbfgs(optimizer)
    scaler = _Scaler() if recipe.precision.scales else None
    index = 0
    for number in range(recipe.steps):
        for part in range(recipe.accumulate):
            hooks.begin("inputs", number)
            batch = hooks.next_batch()
            hooks.begin("forward")
            with recipe.precision.context():
                loss = _loss_in(loss_of(batch, index))
            index += 1
            # As Lightning does by default: the gradients of the last step still exist during forward.
            if part == 0 and recipe.zero_grad == "before_backward":
                _zero_grad(model, optimizers)
            hooks.begin("backward")
            scaled = loss / recipe.accumulate if recipe.accumulate > 1 else loss
            (scaler.scale(scaled) if scaler else scaled).backward()  # type: ignore[no-untyped-call]
            del scaled
            loss = loss.detach()
            del batch
        _step(model, optimizers, recipe, hooks, scaler)
        if recipe.zero_grad == "after_step":
            _zero_grad(model, optimizers)


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    (group,) = optimizer.param_groups
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
    history = 2 * group["history_size"]
    raise ValueError(
        "LBFGS is not estimated: its values decide how often it computes the loss. Its history grows to "
        f"{history} vectors, each as large as all its parameters (history_size={group['history_size']}): "
        f"{format_size(history * n_bytes)}. Estimate the step with torch.optim.SGD, and add that and four vectors more."
    )


def _step(
    model: nn.Module, optimizers: list[Optimizer], recipe: Recipe, hooks: LoopHooks, scaler: _Scaler | None
) -> None:
    if scaler is not None:
        hooks.begin("clip")
        scaler.unscale(model)
    if recipe.clip is not None:
        hooks.begin("clip")
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    hooks.begin("optimizer")
    for optimizer in optimizers:
        if scaler is not None:
            scaler.before(optimizer)
        optimizer.step()
    if scaler is not None:
        scaler.update()


def _train_manually(
    run_step: Callable[[Any, int], Any], optimizers: list[Optimizer], recipe: Recipe, hooks: LoopHooks
) -> None:
    handles = [handle for optimizer in optimizers for handle in _phase_hooks(optimizer, hooks)]
    try:
        for number in range(recipe.steps):
            hooks.begin("inputs", number)
            batch = hooks.next_batch()
            hooks.begin("forward")
            with recipe.precision.context():
                run_step(batch, number)
            del batch
    finally:
        for handle in handles:
            handle.remove()


def _phase_hooks(optimizer: Optimizer, hooks: LoopHooks) -> Iterator[Any]:
    yield optimizer.register_step_pre_hook(lambda *_: hooks.begin("optimizer"))
    yield optimizer.register_step_post_hook(lambda *_: hooks.begin("forward"))


def _evaluate(run_step: Callable[[Any, int], Any], recipe: Recipe, hooks: LoopHooks) -> None:
    # Lightning evaluates in inference mode; the memory is the same, and a dispatch mode sees all operators.
    with torch.no_grad():
        for number in range(recipe.steps):
            hooks.begin("inputs", number)
            batch = hooks.next_batch()
            hooks.begin("forward")
            with recipe.precision.context():
                out = run_step(batch, number)
            del batch
            hooks.begin("outputs")
            del out


def _zero_grad(model: nn.Module, optimizers: list[Optimizer]) -> None:
    if optimizers:
        for optimizer in optimizers:
            optimizer.zero_grad()
    else:
        model.zero_grad()


def _loss_in(out: Any) -> torch.Tensor:
    """Return the loss from the result of a step.

    Raises:
        TypeError: The result holds no loss.
    """
    loss = out.get("loss") if isinstance(out, dict) else out
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        what = "None" if loss is None else f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            what = f"a tensor of shape {list(loss.shape)} with requires_grad={loss.requires_grad}"
        raise TypeError(
            f"The step returned {what}. In training it has to return the loss: a tensor with one element that "
            "requires a gradient, or a dict with it under 'loss'. For a step without a loss use stage='val'."
        )
    return loss


class _Scaler:
    """Allocates the tensors of torch.amp.GradScaler, whose own step reads values, which fake tensors do not have."""

    def __init__(self) -> None:
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._found: list[torch.Tensor] = []

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        if self._state is None:  # the scale and the count of steps since it changed, made with the first loss
            device = loss.device
            self._state = torch.full((), 65536.0, device=device), torch.full((), 0, dtype=torch.int32, device=device)
        return loss * self._state[0]

    def unscale(self, model: nn.Module) -> None:
        assert self._state is not None
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        inverse = self._state[0].double().reciprocal().float()
        found = torch.full((), 0.0, device=inverse.device)
        # GradScaler makes a copy of both for each device, the first one too.
        self._found = [found.to(found.device, copy=True)]
        unscale_gradients(gradients, self._found[0], inverse.to(inverse.device, copy=True))

    def before(self, optimizer: Optimizer) -> None:
        """Make the sum of the flags for non-finite gradients of all devices, which a fused optimizer is given."""
        if any(group.get("fused") for group in optimizer.param_groups):
            self._found.append(self._found[0] + 0)

    def update(self) -> None:
        """Free the flags, which the optimizer's step needs until it is done."""
        self._found = []


def copy_of_batch(batch: Any, dtype: torch.dtype | None, *, values: bool = False) -> Any:
    """Return a copy of a batch: floating-point tensors have this type, and the same values if ``values`` is set."""
    return map_tensors(batch, lambda tensor: _copy(tensor, dtype, values=values))


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None, *, values: bool) -> torch.Tensor:
    changed = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if values:
        return tensor.detach().to("cpu", changed, copy=True).requires_grad_(tensor.requires_grad)
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=changed, device="cpu", requires_grad=tensor.requires_grad
    )
    note_values(made, tensor)
    return made


def batch_size_of(batch: Any) -> int | None:
    """Return the size of the first dimension of the first tensor that has a dimension."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None)
