"""Predict the memory of a training step without a GPU, and without computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.estimate.arguments import check_model, check_numbers, check_optimizer, check_training
from lightning_memtools.estimate.fallback import estimate_on_cpu, explain
from lightning_memtools.estimate.limits import Limit, cublas_workspace_of
from lightning_memtools.estimate.reading import read_estimate
from lightning_memtools.estimate.resizing import resized
from lightning_memtools.estimate.result import MemoryEstimate
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.ddp_buckets import BucketSettings, unwrapped
from lightning_memtools.simulation.precision import Precision, PrecisionName
from lightning_memtools.simulation.step import Recipe, Stage
from lightning_memtools.simulation.tracer import Settings, Subject, trace

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
    device: Literal["cuda", "cpu"] = "cuda",
    allocator: str = "",
    capacity: str | None = None,
    ddp_bucket_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
) -> MemoryEstimate:
    """Predict the peak memory of training, from the model and one batch, without a GPU.

    The step runs on fake tensors: they have sizes and no values, so nothing is computed, and a model on the meta device
    needs no memory. Every storage they would have is given a block in a simulated CUDA caching allocator. The model,
    the batch and the optimizer are left exactly as they were.

    A step is: forward, old gradients set to None, backward, clipping, the optimizer's step; as Lightning's Trainer runs
    it. So from the second step on the gradients of the last one are there during forward.

    Args:
        model: A LightningModule, whose own steps run (automatic or manual optimization), or any module with ``step``.
            A DistributedDataParallel is estimated as one rank, with its buckets.
        batch: As the step wants it: real, meta or fake tensors, in any nesting.
        step: ``step(model, batch)`` returns the loss.
        optimizer: An optimizer over the model's parameters, its class, or a function of the parameters that makes one.
            By default a LightningModule's own; any other module trains without one.
        stage: "train", or "val", "test" or "predict" for a step without gradients.
        precision: By Lightning's names: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        steps: How many steps. Two see the peak of a training that goes on; a third changes little.
        accumulate: How many batches make one step.
        clip: The norm to which gradients are clipped.
        device: "cuda" for what CUDA's operators take (see docs/estimate-memory.md for the list), "cpu" for those of the
            CPU: byte for byte what a `VirtualDevice` shows of a run on real tensors.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        capacity: A size such as "24GiB" or a GPU's name such as "RTX 4090": the report then says whether it fits.
        ddp_bucket_mb: The bucket size of DistributedDataParallel, in MiB, for a rank of a DDP training: 25 is torch's
            default.
        gradient_as_bucket_view: DDP's option of this name: gradients then lie in the buckets, and exist twice only
            where the second forward begins, where DDP makes its buckets anew.

    Returns:
        The prediction. A step that reads values cannot run on fakes: then it runs on real CPU tensors at small batch
        sizes, and ``notes`` states what was extrapolated.

    Raises:
        ValueError: An argument is out of range; the message says what is accepted.
        TypeError: The step returns no loss, or an argument is of another kind than is accepted.
    """
    if VirtualDevice.current() is not None:
        raise RuntimeError(
            f"estimate_memory cannot run while {VirtualDevice.current()!r} is entered: it enters a device of its own. "
            "Leave that one first."
        )
    check_numbers(steps=steps, accumulate=accumulate, clip=clip, ddp_bucket_mb=ddp_bucket_mb)
    check_model(model, step, stage=stage, device=device)
    check_optimizer(optimizer)
    if stage == "train":
        check_training(unwrapped(model), step, optimizer, accumulate=accumulate, clip=clip)
    if capacity is not None:
        Limit.parse(capacity)
    recipe = Recipe(stage=stage, precision=Precision.parse(precision), steps=steps, accumulate=accumulate, clip=clip)
    ddp = BucketSettings.of(model)
    if ddp_bucket_mb is not None:
        ddp = BucketSettings(bucket_mb=ddp_bucket_mb, as_view=gradient_as_bucket_view)
    elif gradient_as_bucket_view and ddp is None:
        raise ValueError("gradient_as_bucket_view belongs to DDP: give the size of its buckets too, ddp_bucket_mb=25.")
    subject = Subject(model=model, step=step, optimizer=optimizer, ddp=ddp)
    settings = Settings(cuda=device == "cuda", allocator=allocator, cublas_workspace=cublas_workspace_of(capacity))
    estimate = _estimate(subject, batch, recipe, settings, capacity)
    is_compiled = any(hasattr(part, "_orig_mod") for part in model.modules())
    return replace(estimate, notes=(*estimate.notes, _EAGER)) if is_compiled else estimate


def _estimate(subject: Subject, batch: Any, recipe: Recipe, settings: Settings, capacity: str | None) -> MemoryEstimate:
    def retrace(size: int) -> MemoryEstimate:
        return _estimate(subject, resized(batch, size), recipe, settings, capacity)

    try:
        traced = trace(subject, batch, recipe, settings)
    except Exception as error:
        obstacle = explain(error)
        if obstacle is None:
            raise
        return estimate_on_cpu(subject, batch, recipe, settings, obstacle, capacity=capacity)
    return read_estimate(traced, unwrapped(subject.model), batch, settings, capacity=capacity, retrace=retrace)
