"""Predicts the memory of a training step without a GPU, and without computing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

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
from lightning_memtools.simulation.cuda_run import trace_on_cuda
from lightning_memtools.simulation.ddp_buckets import BucketSettings, unwrapped
from lightning_memtools.simulation.one_rank import RankSettings, StrategyName, configures_itself
from lightning_memtools.simulation.step_runner import (
    PrecisionName,
    Recipe,
    Stage,
    has_step,
    is_lightning_module,
    step_name,
)
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace

_DDP_BUCKET_MB = 25
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
    strategy: StrategyName | None = None,
    devices: int = 1,
    shard: Callable[[nn.Module, Any], Any] | None = None,
    engine: Literal["simulation", "cuda"] = "simulation",
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
        batch: A batch as the step takes it: real, meta or fake tensors, in any nesting.
        step: ``step(model, batch)`` returns the loss.
        optimizer: An optimizer over the model's parameters, its class, or a function of the parameters that makes one.
            By default a LightningModule's own; any other module trains without one.
        stage: "train", or "val", "test" or "predict" for a step without gradients.
        precision: By Lightning's names: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        steps: The number of steps. Two show the peak of a longer training; a third changes little.
        accumulate: The number of batches per optimizer step.
        clip: The norm to which gradients are clipped.
        device: "cuda" for the memory of CUDA's operators, "cpu" for that of the CPU's: byte for byte the memory that a
            `VirtualDevice` shows for a run on real tensors.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        capacity: A size such as "24GiB" or a GPU's name such as "RTX 4090": the estimate then says whether it fits.
        ddp_bucket_mb: The bucket size of DistributedDataParallel, in MiB, for a rank of a DDP training: 25 is torch's
            default.
        gradient_as_bucket_view: DDP's option of this name: gradients are then views of the buckets, and exist twice
            only at the start of the second forward, where DDP makes its buckets anew.
        strategy: The estimate is of one rank under "ddp", "fsdp" (FSDP 1) or "fsdp2" (`fully_shard`), as torch's own
            code does it in a process group that moves no data. Both kinds of FSDP run on the engine "cuda".
        devices: The number of ranks, each with a GPU.
        shard: ``shard(model, mesh)`` applies `fully_shard` as the training does, with its precision and all else; the
            mesh has one dimension. By default a LightningModule's own ``configure_model`` does, where it has one;
            otherwise members of lists and Sequentials that have others of their class are sharded one by one, and the
            rest together. FSDP 1 takes these blocks always.
        engine: "simulation", or "cuda" to run the steps on PyTorch's own CUDA code, which is several times faster for
            large models. It needs a device that computes nothing: `memtools estimate` starts one where it can, and
            ``python -m lightning_memtools.null_cuda`` any program. The estimate's ``engine`` says which one it was.

    Returns:
        The prediction. A step may read the values of the batch and of what follows from it alone. For other values
        ``notes`` says what was assumed, and where: floats are finite, a mask selects everything, a number is 1.

    Raises:
        ValueError: An argument is out of range; the message says what is accepted.
        TypeError: The step returns no loss, or an argument has a wrong type.
        RuntimeError: A VirtualDevice is active, the steps cannot run on the wanted engine, or an operator has no kernel
            for fake tensors.
    """
    if VirtualDevice.current() is not None:
        raise RuntimeError(
            f"estimate_memory cannot run while {VirtualDevice.current()!r} is entered: it enters a device of its own. "
            "Leave that one first."
        )
    _check_numbers(steps=steps, accumulate=accumulate, clip=clip, ddp_bucket_mb=ddp_bucket_mb)
    _check_model(model, step, stage=stage, device=device)
    _check_precision(precision)
    _check_optimizer(optimizer)
    _check_ranks(strategy, devices, shard)
    is_sharded = strategy not in {None, "ddp"}
    if is_sharded:
        _check_sharding(model, optimizer, strategy=strategy or "", precision=precision, clip=clip, device=device)
    if stage == "train" and not (is_sharded and configures_itself(model)):
        _check_training(unwrapped(model), step, optimizer, accumulate=accumulate, clip=clip)
    if capacity is not None:
        DeviceLimit.parse(capacity)
    recipe = Recipe(stage=stage, precision=precision, steps=steps, accumulate=accumulate, clip=clip)
    if ddp_bucket_mb is None and strategy == "ddp":
        ddp_bucket_mb = _DDP_BUCKET_MB
    ddp = BucketSettings.of(model)
    if ddp_bucket_mb is not None:
        starts_small = ddp_bucket_mb == _DDP_BUCKET_MB
        ddp = BucketSettings(bucket_mb=ddp_bucket_mb, as_view=gradient_as_bucket_view, starts_small=starts_small)
    elif gradient_as_bucket_view and ddp is None:
        raise ValueError("gradient_as_bucket_view belongs to DDP: give the size of its buckets too, ddp_bucket_mb=25.")
    ranks = _ranks(strategy or ("ddp" if ddp and engine == "cuda" else None), devices, shard, ddp)
    subject = Subject(model=model, step=step, optimizer=optimizer, ddp=ddp, ranks=ranks)
    settings = SimulationSettings(
        cuda=device == "cuda",
        allocator=allocator,
        cublas_workspace=cublas_workspace_of(capacity),
        gpu=GpuShape.of(None if capacity is None else find_gpu(capacity)),
    )
    if engine not in {"simulation", "cuda"}:
        raise ValueError(f"Unknown engine {engine!r}. Accepted are 'simulation' and 'cuda'.")
    if engine == "cuda" and device != "cuda":
        raise ValueError(f'engine="cuda" runs the operators of CUDA: leave device={device!r} out, or the engine.')
    make = estimate_step if engine == "simulation" and not is_sharded else _estimate_on_cuda
    estimate = make(subject, batch, recipe, settings, capacity)
    is_compiled = any(type(part).__name__ == "OptimizedModule" for part in model.modules())
    return replace(estimate, notes=(*estimate.notes, _EAGER)) if is_compiled else estimate


def _ranks(
    strategy: StrategyName | None,
    devices: int,
    shard: Callable[[nn.Module, Any], Any] | None,
    ddp: BucketSettings | None,
) -> RankSettings | None:
    """Return the ranks of a strategy; DDP's buckets alone are those of two or more."""
    if strategy is None:
        return None
    return RankSettings(strategy=strategy, devices=max(2, devices), shard=shard, buckets=ddp)


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
            'for tensors without values. Register one with torch.library.register_fake, or use engine="cuda".'
        ) from error
    notes = traced.notes
    if subject.ranks is not None:
        notes = (f"One of {subject.ranks.devices} ranks under DDP.", *notes)
    model = unwrapped(subject.model)
    return read_estimate(traced, model, batch, settings, capacity=capacity, retrace=retrace, notes=notes)


def _estimate_on_cuda(
    subject: Subject, batch: Any, recipe: Recipe, settings: SimulationSettings, capacity: str | None
) -> MemoryEstimate:
    def retrace(size: int) -> MemoryEstimate:
        return _estimate_on_cuda(subject, resized(batch, size), recipe, settings, capacity)

    inner = replace(subject, model=unwrapped(subject.model))
    traced = trace_on_cuda(inner, batch, recipe, settings)
    estimate = read_estimate(
        traced, inner.model, batch, settings, capacity=capacity, retrace=retrace, notes=traced.notes
    )
    return replace(estimate, engine="cuda")


def _check_numbers(*, steps: int, accumulate: int, clip: float | None, ddp_bucket_mb: float | None) -> None:
    """Raise for numbers that are out of range.

    Raises:
        ValueError: A number is out of range.
    """
    for name, number in (("steps", steps), ("accumulate", accumulate)):
        if not is_count(number):
            raise ValueError(f"{name} is {number!r}: it has to be a whole number of at least 1.")
    if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
        raise ValueError(f"clip is {clip!r}: it has to be the norm to clip gradients to, a number above 0, or None.")
    if ddp_bucket_mb is not None and not ddp_bucket_mb > 0:
        raise ValueError(f"ddp_bucket_mb is {ddp_bucket_mb!r}: it has to be above 0 MiB, such as torch's default, 25.")


def _check_ranks(strategy: object, devices: object, shard: object) -> None:
    """Raise for unknown strategies, and for settings of ranks that contradict each other.

    Raises:
        ValueError: These are refused.
    """
    if strategy is not None and strategy not in get_args(StrategyName):
        accepted = ", ".join(map(repr, get_args(StrategyName)))
        why = ""
        if "deepspeed" in str(strategy):
            why = (
                " DeepSpeed's engine keeps parameters, gradients and optimizer states in buffers of its own, which "
                'torch knows nothing of. Its ZeRO stage 3 spreads the same tensors over ranks as "fsdp2" does.'
            )
        raise ValueError(f"Unknown strategy {strategy!r}. Accepted are {accepted}.{why}")
    if not is_count(devices):
        raise ValueError(f"devices is {devices!r}: it has to be the number of ranks, such as 8.")
    if (strategy is None) != (devices == 1):
        raise ValueError(
            f"strategy={strategy!r} and devices={devices!r} do not go together: give both, such as "
            'strategy="fsdp2", devices=8, or neither for a single device.'
        )
    if shard is not None and (strategy != "fsdp2" or not callable(shard)):
        raise ValueError(
            f'shard={shard!r} with strategy={strategy!r}: shard belongs to strategy="fsdp2", and is a function of the '
            "model and the mesh that applies fully_shard."
        )


def _check_sharding(
    model: nn.Module, optimizer: object, *, strategy: str, precision: str, clip: float | None, device: str
) -> None:
    """Raise for models that cannot be sharded or trained in this way.

    Raises:
        TypeError: The model is wrapped already, or the optimizer is one of whole parameters.
        ValueError: The settings are refused.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError(f"strategy={strategy!r} and a DistributedDataParallel: pass the module that it wraps.")
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"The {type(optimizer).__name__} that was passed holds whole parameters, and under strategy={strategy!r} "
            "an optimizer is made once they are sharded: pass its class, or a function of the parameters."
        )
    if precision == "16-mixed":
        raise ValueError(
            f'precision="16-mixed" is not estimated under strategy={strategy!r}: its scaler reads gradients of all '
            'ranks. "bf16-mixed" takes the same memory but for that scaler.'
        )
    if clip is not None and strategy == "fsdp":
        raise ValueError(
            "clip is not estimated under FSDP 1, where Lightning refuses to clip norms too: one rank's shards have no "
            'norm of their own. Leave it out, or take strategy="fsdp2".'
        )
    if device != "cuda":
        raise ValueError(f"strategy={strategy!r} runs on PyTorch's CUDA code: leave device={device!r} out.")


def _check_model(model: object, step: object, *, stage: str, device: str) -> None:
    """Raise for models without a step, and for unknown stages and devices.

    Raises:
        TypeError: The model is no module, or the step no function.
        ValueError: The stage or the device is unknown, or the model lacks the stage's step.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if stage not in get_args(Stage):
        raise ValueError(f"Unknown stage {stage!r}. Accepted are {', '.join(map(repr, get_args(Stage)))}.")
    if device not in {"cuda", "cpu"}:
        raise ValueError(f"Unknown device {device!r}. Accepted are 'cuda' and 'cpu': whose operators are estimated.")
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
