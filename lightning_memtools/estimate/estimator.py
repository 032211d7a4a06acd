"""Predicts the memory of a training step without a GPU, and without computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_memtools._torch import NO_FAKE_KERNEL, uncompiled
from lightning_memtools.estimate.batch_sizes import resized
from lightning_memtools.estimate.memory_estimate import MemoryEstimate, usable_bytes
from lightning_memtools.estimate.trace_reading import read_estimate
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.step_runner import (
    STEP_NAMES,
    PrecisionName,
    Recipe,
    Stage,
    has_step,
    is_lightning_module,
)
from lightning_memtools.simulation.tracer import StepRequest, trace

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

    The step runs on fake tensors, which have sizes but no values: nothing is computed, and a model on the meta device
    needs no memory. A simulated CUDA caching allocator allocates a block for each storage. The model, the batch and
    the optimizer are left exactly as they were.

    A step runs as in Lightning's Trainer: forward, gradients set to None, backward, clipping, the optimizer's step. So
    from the second step on, the previous gradients are still allocated during forward. A Trainer's callbacks are left
    out. For one rank of DDP or FSDP, use a dry run of the script (docs/dry-run.md).

    Args:
        model: A LightningModule, whose own steps run (automatic or manual optimization), or a module with `step` given.
        batch: A batch in the form that the step takes: real, meta or fake tensors, nested in any way.
        step: ``step(model, batch)`` returns the loss.
        optimizer: An optimizer over the model's parameters, its class, or a function of the parameters that makes one.
            By default, the LightningModule's own; any other module then trains without an optimizer.
        stage: "train"; or, for a step without gradients, "val", "test" or "predict".
        precision: One of Lightning's names: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        steps: The number of steps. Two show the peak of longer training; a third changes little.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        capacity: A size such as "24GiB" or a GPU's name such as "RTX 4090": the estimate then says whether it fits.

    Returns:
        The prediction. Values that depend only on the batch can be read. Other values that the step reads are
        assumed: floats are finite, a mask selects everything, a number is 1. ``notes`` says what is assumed, and where.

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
    request = StepRequest(
        model=model,
        batch=batch,
        recipe=Recipe(stage=stage, precision=precision, steps=steps, accumulate=accumulate, clip=clip),
        step=step,
        optimizer=optimizer,
        allocator=allocator,
        capacity=capacity,
    )
    for error in _faults(request):
        raise error
    if capacity is not None:
        usable_bytes(capacity)
    estimate = estimate_step(request)
    is_compiled = any(type(part).__name__ == "OptimizedModule" for part in model.modules())
    return replace(estimate, notes=(*estimate.notes, _EAGER)) if is_compiled else estimate


def estimate_step(request: StepRequest) -> MemoryEstimate:
    """Estimate the memory of steps by running them on fake tensors; see `estimate_memory`.

    Raises:
        RuntimeError: An operator has no kernel for fake tensors.
        Exception: Whatever the step raises.
    """

    def retrace(size: int) -> MemoryEstimate:
        return estimate_step(replace(request, batch=resized(request.batch, size)))

    try:
        traced = trace(request)
    except (*NO_FAKE_KERNEL, NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NO_FAKE_KERNEL) and "no fake impl" not in str(error):
            raise
        raise RuntimeError(
            f"{str(error).splitlines()[0]} At {user_line_of(error) or 'an unknown line'}, an operator has no kernel "
            "for tensors without values. Register one with torch.library.register_fake, or run the script dry "
            "(memtools dry-run), which needs none."
        ) from error
    return read_estimate(traced, request, retrace)


def _faults(request: StepRequest) -> Iterator[Exception]:
    """Yield an exception for each invalid argument. Later exceptions may be consequences of the first one."""
    recipe = request.recipe
    for name, number in (("steps", recipe.steps), ("accumulate", recipe.accumulate)):
        if not is_count(number):
            yield ValueError(f"{name} is {number!r}: it has to be a whole number of at least 1.")
    clip, optimizer = recipe.clip, request.optimizer
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        yield ValueError(f"clip is {clip!r}: it has to be the norm to clip gradients to, a number above 0, or None.")
    for name, value, known in (("stage", recipe.stage, Stage), ("precision", recipe.precision, PrecisionName)):
        if value not in get_args(known):
            yield ValueError(f"Unknown {name} {value!r}. Accepted are {', '.join(map(repr, get_args(known)))}.")
    yield from _faults_of_model(request.model, request.step, recipe.stage)
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        yield TypeError(
            f"optimizer is {optimizer!r}: pass an optimizer, its class such as torch.optim.AdamW, or a function of the "
            "parameters such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    if recipe.stage == "train":
        yield from _faults_of_training(uncompiled(request.model), request)


def _faults_of_model(model: Any, step: Any, stage: Stage) -> Iterator[Exception]:
    """Yield an exception for each reason why the model or its step cannot run."""
    if not isinstance(model, nn.Module):
        yield TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        yield ValueError(
            "A DistributedDataParallel is one rank of several, and estimate_memory estimates one GPU: pass the module "
            "that it wraps, or run the script dry (memtools dry-run --devices 2), which shows a rank with its buckets."
        )
    if step is not None:
        if not callable(step):
            yield TypeError(f"step must be a function, step=lambda model, batch: loss; got {type(step).__name__}.")
        return
    inner, name = uncompiled(model), STEP_NAMES[stage]
    if not is_lightning_module(inner):
        yield ValueError(
            f"{type(inner).__name__} is no LightningModule, so estimate_memory does not know its step. Pass "
            "step=lambda model, batch: loss, such as step=lambda model, batch: mse_loss(model(batch[0]), batch[1])."
        )
    if not has_step(inner, name):
        yield ValueError(f"{type(inner).__name__} has no {name}, which stage={stage!r} runs. Define it, or pass step.")


def _faults_of_training(model: nn.Module, request: StepRequest) -> Iterator[Exception]:
    """Yield an exception for each reason why a model cannot be trained as requested."""
    parameters, optimizer = {id(parameter) for parameter in model.parameters()}, request.optimizer
    if not parameters:
        yield ValueError(
            f"{type(model).__name__} has no parameters to train. If it makes them in configure_model or setup, call "
            'that first; under torch.device("meta") they take no memory.'
        )
    if isinstance(optimizer, Optimizer) and not any(
        id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]
    ):
        yield ValueError(
            f"The {type(optimizer).__name__} that was passed holds none of the parameters of {type(model).__name__}, "
            "so it would train something else. Make it from model.parameters(), or pass its class."
        )
    is_manual = request.step is None and not getattr(model, "automatic_optimization", True)
    if is_manual and (request.recipe.accumulate > 1 or request.recipe.clip is not None):
        yield ValueError(
            f"{type(model).__name__} optimizes manually, where a Trainer neither accumulates nor clips: leave "
            "accumulate and clip out. What its training_step does of either is part of the estimate."
        )
