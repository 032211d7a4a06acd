"""One step after the other, as a training loop runs them, and which phase each part belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import unscale_gradients
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.precision import Precision
from lightning_memtools.simulation.trainer_stand_in import (
    TrainerStandIn,
    accepted_arguments,
    attach,
    configured_optimizers,
)

Stage = Literal["train", "val", "test", "predict"]
STEP_NAMES = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How steps run.

    Attributes:
        stage: train, or a stage without gradients.
        precision: Of parameters and computation.
        steps: How many optimizer steps, or batches of another stage.
        accumulate: How many batches make one optimizer step.
        clip: Gradients are clipped to this norm; None for no clipping.
        zero_grad: Old gradients go before backward, as in Lightning, or when the optimizer's step is done.
    """

    stage: Stage = "train"
    precision: Precision
    steps: int = 2
    accumulate: int = 1
    clip: float | None = None
    zero_grad: Literal["before_backward", "after_step"] = "before_backward"


class Watch:
    """What a loop tells of its course; the real one is `tracing.Tracer`, this one listens to nothing."""

    def begin(self, phase: str, step: int | None = None) -> None:
        """A phase begins."""

    def fresh_batch(self) -> Any:
        """The next batch, on the device."""
        raise NotImplementedError

    def seen(self, optimizers: list[Optimizer]) -> None:
        """These are the optimizers."""


StepFunction = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def run_module(
    model: nn.Module, step: StepFunction, make_optimizer: MakeOptimizer | None, recipe: Recipe, watch: Watch
) -> None:
    """Run the steps of any module.

    Args:
        model: The module.
        step: Computes the loss of a batch; in a stage without gradients its result is dropped.
        make_optimizer: Makes the optimizer of the parameters; None to train without one.
        recipe: How.
        watch: Gives batches, and is told the phases.
    """
    training = recipe.stage == "train"
    model.train(training)
    optimizers = [make_optimizer(list(model.parameters()))] if training and make_optimizer else []
    watch.seen(optimizers)
    if training:
        _train(model, lambda batch, _index: step(model, batch), optimizers, recipe, watch)
    else:
        _evaluate(lambda batch, _index: step(model, batch), recipe, watch)


def run_lightning(
    module: Any, own_step: StepFunction | None, make_optimizer: MakeOptimizer | None, recipe: Recipe, watch: Watch
) -> None:
    """Run the steps of a LightningModule, automatic or manual optimization.

    Args:
        module: The LightningModule; its attributes must be noted, to be put back afterwards.
        own_step: The user's, in place of the module's; in training it returns the loss.
        make_optimizer: In place of its own ``configure_optimizers``.
        recipe: How.
        watch: Gives batches, and is told the phases.
    """
    training = recipe.stage == "train"
    scaler = _Scaler() if recipe.precision.scales and training else None

    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        watch.begin("backward")
        (scaler.scale(loss) if scaler else loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        watch.begin("forward")

    trainer = TrainerStandIn(backward=backward, stage=recipe.stage)
    attach(module, trainer)
    module.train(training)
    if training:
        optimizers, schedulers = (
            ([make_optimizer(list(module.parameters()))], []) if make_optimizer else configured_optimizers(module)
        )
        trainer.use(optimizers, schedulers)
        watch.seen(optimizers)
    step = getattr(module, STEP_NAMES[recipe.stage])

    def run_step(batch: Any, index: int) -> Any:
        if own_step is not None:
            return own_step(module, batch)
        return step(*accepted_arguments(step, batch, index))

    if not training:
        _evaluate(run_step, recipe, watch)
    elif module.automatic_optimization or own_step is not None:
        _train(module, run_step, optimizers, recipe, watch)
    else:
        _train_manually(run_step, optimizers, recipe, watch)


def _train(
    model: nn.Module,
    loss_of: Callable[[Any, int], Any],
    optimizers: list[Optimizer],
    recipe: Recipe,
    watch: Watch,
) -> None:
    for optimizer in optimizers:
        _refuse_lbfgs(optimizer)
    scaler = _Scaler() if recipe.precision.scales else None
    index = 0
    for number in range(recipe.steps):
        for part in range(recipe.accumulate):
            watch.begin("inputs", number)
            batch = watch.fresh_batch()
            watch.begin("forward")
            with recipe.precision.context():
                loss = _loss_in(loss_of(batch, index))
            index += 1
            # Lightning's order, and that of article A: the gradients of the last step are there during forward.
            if part == 0 and recipe.zero_grad == "before_backward":
                _zero_grad(model, optimizers)
            watch.begin("backward")
            scaled = loss / recipe.accumulate if recipe.accumulate > 1 else loss
            (scaler.scale(scaled) if scaler else scaled).backward()  # type: ignore[no-untyped-call]
            del scaled
            loss = loss.detach()
            del batch
        _step(model, optimizers, recipe, watch, scaler)
        if recipe.zero_grad == "after_step":
            _zero_grad(model, optimizers)


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    (group,) = optimizer.param_groups
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
    history = 2 * group["history_size"]
    raise ValueError(
        "LBFGS is not estimated: it computes the loss again and again, as often as its values ask for. What it keeps "
        f"grows up to {history} vectors as large as all its parameters (history_size={group['history_size']}): "
        f"{format_size(history * n_bytes)}. Estimate the step with torch.optim.SGD, and add that and four vectors more."
    )


def _step(model: nn.Module, optimizers: list[Optimizer], recipe: Recipe, watch: Watch, scaler: _Scaler | None) -> None:
    if scaler is not None:
        watch.begin("clip")
        scaler.unscale(model)
    if recipe.clip is not None:
        watch.begin("clip")
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    watch.begin("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    if scaler is not None:
        scaler.update()


def _train_manually(
    run_step: Callable[[Any, int], Any], optimizers: list[Optimizer], recipe: Recipe, watch: Watch
) -> None:
    hooks = [hook for optimizer in optimizers for hook in _phase_hooks(optimizer, watch)]
    try:
        for number in range(recipe.steps):
            watch.begin("inputs", number)
            batch = watch.fresh_batch()
            watch.begin("forward")
            with recipe.precision.context():
                run_step(batch, number)
            del batch
    finally:
        for hook in hooks:
            hook.remove()


def _phase_hooks(optimizer: Optimizer, watch: Watch) -> Iterator[Any]:
    yield optimizer.register_step_pre_hook(lambda *_: watch.begin("optimizer"))
    yield optimizer.register_step_post_hook(lambda *_: watch.begin("forward"))


def _evaluate(run_step: Callable[[Any, int], Any], recipe: Recipe, watch: Watch) -> None:
    # Lightning evaluates in inference mode; the memory is the same, and a dispatch mode sees all operators.
    with torch.no_grad():
        for number in range(recipe.steps):
            watch.begin("inputs", number)
            batch = watch.fresh_batch()
            watch.begin("forward")
            with recipe.precision.context():
                out = run_step(batch, number)
            del batch
            watch.begin("outputs")
            del out


def _zero_grad(model: nn.Module, optimizers: list[Optimizer]) -> None:
    if optimizers:
        for optimizer in optimizers:
            optimizer.zero_grad()
    else:
        model.zero_grad()


def _loss_in(out: Any) -> torch.Tensor:
    """The loss in what a step returned.

    Raises:
        TypeError: There is none.
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
    """The tensors of torch.amp.GradScaler; its own step reads whether gradients are finite, which fakes cannot say."""

    def __init__(self) -> None:
        self._scale = torch.full((), 65536.0)
        self._growth = torch.full((), 0, dtype=torch.int32)
        self._found: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def unscale(self, model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found, inverse = torch.full((), 0.0), self._scale.double().reciprocal().float()
        unscale_gradients(gradients, found, inverse)
        self._found = found
        del inverse

    def update(self) -> None:
        """What says whether gradients are finite is needed until the optimizer's step is done."""
        self._found = None


def copy_of_batch(batch: Any, dtype: torch.dtype | None, *, values: bool = False) -> Any:
    """New tensors of the same sizes, in the precision of the inputs; with the same values, if they are wanted."""
    return map_tensors(batch, lambda tensor: _copy(tensor, dtype, values=values))


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None, *, values: bool) -> torch.Tensor:
    changed = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if values:
        return tensor.detach().to("cpu", changed, copy=True).requires_grad_(tensor.requires_grad)
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=changed, device="cpu", requires_grad=tensor.requires_grad
    )


def batch_size_of(batch: Any) -> int | None:
    """The size of the first dimension of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None)
