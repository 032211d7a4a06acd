"""Predicts the memory of a training step without a GPU, and without computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_memtools._torch import UnsupportedOperatorException
from lightning_memtools.estimate.batch_sizes import resized
from lightning_memtools.estimate.memory_estimate import DeviceLimit, MemoryEstimate, cublas_workspace_of
from lightning_memtools.estimate.trace_reading import read_estimate
from lightning_memtools.memory.sizes import GpuShape, find_gpu, is_count
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.step_runner import (
    PrecisionName,
    Recipe,
    Stage,
    has_step,
    is_lightning_module,
    step_name,
)
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace, unwrapped

_EAGER = "torch.compile is left out: these are the figures of the eager step."


def estimate_memory(
    model: nn.Module,
    batch: Any,
    *,
    step: Callable[[Any, Any], Any] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    stage: Stage = "train",
    precision: PrecisionName = "32-true",
    steps: int = 2,
    accumulate: int = 1,
    clip: float | None = None,
    allocator: str = "",
    capacity: str | None = None,
) -> MemoryEstimate:
    """Predict the peak memory of training on one GPU, from the model and one batch, without a GPU.

    The step runs on fake tensors: they have sizes and no values, so nothing is computed, and a model on the meta device
    needs no memory. Every storage they would have is given a block in a simulated CUDA caching allocator. The model,
    the batch and the optimizer are left exactly as they were.

    A step is: forward, old gradients set to None, backward, clipping, the optimizer's step; as Lightning's Trainer runs
    it. So from the second step on the gradients of the last one are there during forward. A Trainer's callbacks are
    left out. One rank of DDP or FSDP is what a dry run of the script shows (docs/dry-run.md).

    Args:
        model: A LightningModule, whose own steps run (automatic or manual optimization), or any module with ``step``.
        batch: A batch as the step takes it: real, meta or fake tensors, in any nesting.
        step: ``step(model, batch)`` returns the loss.
        optimizer: An optimizer over the model's parameters, its class, or a function of the parameters that makes one.
            By default a LightningModule's own; any other module trains without one.
        stage: "train", or "val", "test" or "predict" for a step without gradients.
        precision: By Lightning's names: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        steps: The number of steps. Two show the peak of a longer training; a third changes little.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        capacity: A size such as "24GiB" or a GPU's name such as "RTX 4090": the estimate then says whether it fits.

    Returns:
        The prediction. A step may read the values of the batch and of what follows from it alone. For other values
        ``notes`` says what was assumed, and where: floats are finite, a mask selects everything, a number is 1.

    Raises:
        ValueError: An argument is out of range; the message says what is accepted.
        TypeError: The step returns no loss, or an argument has a wrong type.
        RuntimeError: A VirtualDevice is active, or an operator has no kernel for fake tensors.
    """
    if VirtualDevice.current() is not None:
        raise RuntimeError(
            f"estimate_memory cannot run while {VirtualDevice.current()!r} is entered: it enters a device of its own. "
            "Leave that one first."
        )
    _check_numbers(steps=steps, accumulate=accumulate, clip=clip)
    _check_model(model, step, stage=stage)
    _check_precision(precision)
    _check_optimizer(optimizer)
    if stage == "train":
        _check_training(unwrapped(model), step, optimizer, accumulate=accumulate, clip=clip)
    if capacity is not None:
        DeviceLimit.parse(capacity)
    settings = SimulationSettings(
        cuda=True,
        allocator=allocator,
        cublas_workspace=cublas_workspace_of(capacity),
        gpu=GpuShape.of(None if capacity is None else find_gpu(capacity)),
    )
    recipe = Recipe(stage=stage, precision=precision, steps=steps, accumulate=accumulate, clip=clip)
    subject = Subject(model=model, step=step, optimizer=optimizer)
    estimate = estimate_step(subject, batch, recipe, settings, capacity)
    is_compiled = any(type(part).__name__ == "OptimizedModule" for part in model.modules())
    return replace(estimate, notes=(*estimate.notes, _EAGER)) if is_compiled else estimate


def estimate_step(
    subject: Subject, batch: Any, recipe: Recipe, settings: SimulationSettings, capacity: str | None
) -> MemoryEstimate:
    """Estimate steps on fake tensors; see `estimate_memory`.

    Raises:
        RuntimeError: An operator has no kernel for fake tensors.
        Exception: Whatever the step raises.
    """

    def retrace(size: int) -> MemoryEstimate:
        return estimate_step(subject, resized(batch, size), recipe, settings, capacity)

    try:
        traced = trace(subject, batch, recipe, settings)
    except (UnsupportedOperatorException, NotImplementedError, RuntimeError) as error:
        if not isinstance(error, UnsupportedOperatorException) and "no fake impl" not in str(error):
            raise
        raise RuntimeError(
            f"{str(error).splitlines()[0]} At {user_line_of(error) or 'an unknown line'}, an operator has no kernel "
            "for tensors without values. Register one with torch.library.register_fake, or run the script dry "
            "(memtools dry-run), which needs none."
        ) from error
    return read_estimate(traced, unwrapped(subject.model), batch, capacity=capacity, retrace=retrace)


def _check_numbers(*, steps: int, accumulate: int, clip: float | None) -> None:
    """Raise for numbers that are out of range.

    Raises:
        ValueError: A number is out of range.
    """
    for name, number in (("steps", steps), ("accumulate", accumulate)):
        if not is_count(number):
            raise ValueError(f"{name} is {number!r}: it has to be a whole number of at least 1.")
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip is {clip!r}: it has to be the norm to clip gradients to, a number above 0, or None.")


def _check_model(model: object, step: object, *, stage: str) -> None:
    """Raise for models without a step, and for unknown stages.

    Raises:
        TypeError: The model is no module, or the step no function.
        ValueError: The stage is unknown, the model lacks the stage's step, or it is one rank's part of a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if stage not in get_args(Stage):
        raise ValueError(f"Unknown stage {stage!r}. Accepted are {', '.join(map(repr, get_args(Stage)))}.")
    if isinstance(model, DistributedDataParallel):
        raise ValueError(  # noqa: TRY004, its class is right, and its use is not
            "A DistributedDataParallel is one rank of several, and estimate_memory estimates one GPU: pass the module "
            "that it wraps, or run the script dry (memtools dry-run --devices 2), which shows a rank with its buckets."
        )
    if step is not None:
        if not callable(step):
            raise TypeError(f"step must be a function, step=lambda model, batch: loss; got {type(step).__name__}.")
        return
    inner = unwrapped(model)
    if not is_lightning_module(inner):
        raise ValueError(
            f"{type(inner).__name__} is no LightningModule, so estimate_memory does not know its step. Pass "
            "step=lambda model, batch: loss, such as step=lambda model, batch: mse_loss(model(batch[0]), batch[1])."
        )
    name = step_name(stage)
    if not has_step(inner, name):
        raise ValueError(f"{type(inner).__name__} has no {name}, which stage={stage!r} runs. Define it, or pass step.")


def _check_precision(precision: object) -> None:
    """Raise for an unknown precision.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision not in get_args(PrecisionName):
        accepted = ", ".join(map(repr, get_args(PrecisionName)))
        raise ValueError(f"Unknown precision {precision!r}. Accepted are {accepted}.")


def _check_optimizer(optimizer: object) -> None:
    """Raise for a value that is not an optimizer and does not make one.

    Raises:
        TypeError: The value is one of these.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}: pass an optimizer, its class such as torch.optim.AdamW, or a function of the "
            "parameters such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )


def _check_training(model: nn.Module, step: object, optimizer: object, *, accumulate: int, clip: float | None) -> None:
    """Raise for models that cannot be trained in the given way.

    Raises:
        ValueError: There is nothing to train, or not with this optimizer, or not in this way.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no parameters to train. If it makes them in configure_model or setup, call "
            'that first; under torch.device("meta") they take no memory.'
        )
    if isinstance(optimizer, Optimizer) and not any(
        id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ValueError(
            f"The {type(optimizer).__name__} that was passed holds none of the parameters of {type(model).__name__}, "
            "so it would train something else. Make it from model.parameters(), or pass its class."
        )
    if step is None and not getattr(model, "automatic_optimization", True) and (accumulate > 1 or clip is not None):
        raise ValueError(
            f"{type(model).__name__} optimizes manually, where a Trainer neither accumulates nor clips: leave "
            "accumulate and clip out. What its training_step does of either is part of the estimate."
        )
