"""The failed step, with all facts that the checks need to trace it again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import resized
from lightning_memtools.estimate.estimator import estimate_step
from lightning_memtools.memory.allocator import AllocatorConfig
from lightning_memtools.memory.allocator.memory_snapshot import config_of
from lightning_memtools.memory.leaks.holdings import Holdings
from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes
from lightning_memtools.memory.sizes import find_gpu
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.failure_facts import FailureFacts
from lightning_memtools.oom.recorded_history import RecordedHistory
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.simulation.step_runner import PrecisionName, Recipe, Stage
from lightning_memtools.simulation.tracer import StepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """The properties of a failed run on which advice depends, read from its Trainer.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        trainer: The Trainer; None if there is none.
        precision: The precision, as Lightning names it, such as "16-mixed".
        accumulate: The number of batches per optimizer step.
        can_accumulate: True if the number of batches per optimizer step can be changed.
        clip: The norm to which gradients are clipped; None for no clipping.
        untraceable: The reason why steps cannot be traced; "" if they can.
        plan: The checkpoint plan in use: which activations are recomputed; None if there is no plan.
        others: Other objects of the run: callbacks and the data module.
        recovery: The code that adds the callback OOMRecovery, if it could run the failed batch in parts; else "".
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    trainer: Any = None
    precision: Any = "32-true"
    accumulate: int = 1
    can_accumulate: bool = True
    clip: float | None = None
    untraceable: str = ""
    plan: CheckpointPlan | None = None
    others: Sequence[Any] = ()
    recovery: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """A step that ran out of memory, with everything that the advice depends on. Sizes are in bytes.

    Attributes:
        facts: The facts captured when memory ran out.
        run: The properties of the run, read from its Trainer.
        is_cuda_like: True if the step failed on a GPU with CUDA's allocator, real or simulated.
        cuda: True to trace CUDA operators, False to trace CPU operators.
        gpu: The GPU's name in the list of known GPUs; None to trace the kernels of a default GPU.
        config: The allocator's settings.
        history: The allocator's recorded history; None if none was recorded.
        evaluation_began: The time, on the history's clock, at which the evaluation began; None in training.
        processes: Other processes on the device, or the reason why they are not known; None if there is no real
            device.
        held: The objects that hold device memory that the step does not need.
    """

    facts: FailureFacts
    run: FailedRun
    is_cuda_like: bool = False
    cuda: bool = False
    gpu: str | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    history: RecordedHistory | None = None
    evaluation_began: int | None = None
    processes: Sequence[GpuProcess] | str | None = None
    held: Holdings = field(default_factory=Holdings)

    @property
    def stage(self) -> Stage | None:
        """The stage ("train", "val", "test" or "predict"); None if no step had begun."""
        name: Any = self.facts.moment.stage
        return name if name in get_args(Stage) else None

    @property
    def precision(self) -> PrecisionName | None:
        """The name of the precision; None if steps in that precision cannot be simulated."""
        name: Any = self.run.precision
        return name if name in get_args(PrecisionName) else None

    @property
    def usable(self) -> int | None:
        """The bytes of device memory that a traced step may use; None if unknown."""
        facts, capacity = self.facts, self.facts.stats.capacity
        if capacity is None or facts.split is None:
            return None
        return min(capacity - (facts.used_by_others or 0), int(facts.fraction * capacity)) - self.untraced

    @property
    def untraced(self) -> int:
        """The bytes that this process has allocated but that do not appear in a trace of the step."""
        names = ["other"] if self.stage == "train" else ["other", "gradients", "optimizer"]
        return 0 if self.facts.split is None else sum(self.facts.split[name] for name in names)

    def why_not_traced(self) -> str:
        """Return the reason why the step cannot be traced; "" if it can."""
        if self.run.untraceable:
            return self.run.untraceable
        if self.stage is None:
            return "no step had begun"
        if self.facts.batch is None or self.facts.samples is None:
            return "the batch is not known"
        return "" if self.precision else "its precision is not simulated"

    def estimate(
        self,
        size: int | None = None,
        *,
        batch: Any = None,
        precision: PrecisionName | None = None,
        accumulate: int | None = None,
        plan: CheckpointPlan | None = None,
    ) -> MemoryEstimate:
        """Return a memory estimate for the step, with another batch, precision, accumulation or checkpoint plan.

        `size` is the number of samples that the failed batch is cut or extended to.

        Raises:
            Exception: Whatever the step raises on fake tensors.
        """
        batch = self.facts.batch if batch is None else batch
        request = self.request(
            batch if size in {None, self.facts.samples} else resized(batch, int(size or 0)), precision, accumulate
        )
        plan = plan or self.run.plan
        # A plan is still applied where the callback that applied it has not been told of the error yet.
        is_applied = any("forward" in vars(module) for module in self.run.model.modules())
        with nullcontext() if plan is None or is_applied else plan.apply(self.run.model):
            return estimate_step(request)

    def request(self, batch: Any, precision: PrecisionName | None = None, accumulate: int | None = None) -> StepRequest:
        """Return a request to trace the step, for an estimate or for a checkpoint plan."""
        run, stage = self.run, self.stage
        assert stage is not None
        # Without their state, which may be incomplete where a step has failed.
        own = [copy_optimizer(optimizer, lambda tensor: tensor, with_state=False) for optimizer in run.optimizers]
        recipe = Recipe(
            stage=stage,
            precision=precision or self.precision or "32-true",
            # More than two batches per step take the same memory as two.
            accumulate=min(accumulate or run.accumulate, 2) if stage == "train" else 1,
            clip=run.clip,
        )
        return StepRequest(
            model=run.model,
            batch=batch,
            recipe=recipe,
            optimizer=(own or None) if stage == "train" else None,
            trainer=run.trainer,
            cuda=self.cuda,
            # The share that this process may reserve is part of `usable`.
            allocator=replace(self.config, per_process_memory_fraction=1.0).to_string(),
            capacity=self.gpu,
            batch_idx=self.facts.moment.batch_idx or 0,
        )


def failed_step(
    run: FailedRun, facts: FailureFacts, capture: FailureCapture, snapshot: dict[str, Any] | None, held: Holdings
) -> FailedStep:
    """Create a FailedStep from the run, the captured facts, the memory snapshot and the objects that hold memory."""
    device, virtual = capture.device, capture.virtual
    config = virtual.settings if virtual is not None else config_of(snapshot or {})
    config = replace(config, per_process_memory_fraction=facts.fraction)
    history = None
    if snapshot is not None and facts.stats.capacity is not None:
        history = RecordedHistory(snapshot, config, facts.stats.capacity, facts.used_by_others or 0, device.index or 0)
    return FailedStep(
        facts=facts,
        run=run,
        is_cuda_like=device.type == "cuda" or virtual is not None,
        cuda=device.type == "cuda" or (virtual is not None and virtual.cuda_like),
        gpu=_name_of_gpu(device),
        config=config,
        history=history,
        evaluation_began=None if facts.moment.stage == "train" else capture.evaluation_began,
        processes=processes_of(capture, facts),
        held=held,
    )


def processes_of(capture: FailureCapture, facts: FailureFacts) -> Sequence[GpuProcess] | str | None:
    """Return the other processes on the device, or why they are unknown; None if it is no GPU, real or simulated."""
    if capture.virtual is not None:
        others = (facts.used_by_others or 0) - capture.virtual.context_bytes
        return [GpuProcess(0, "others (simulated)", others)] if others > 0 else []
    return other_gpu_processes(capture.device.index or 0) if capture.device.type == "cuda" else None


def _name_of_gpu(device: torch.device) -> str | None:
    """Return the name of a CUDA device in the list of known GPUs; None if it is not in the list."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    with suppress(ValueError):  # it comes with different sizes
        gpu = find_gpu(torch.cuda.get_device_name(device).removesuffix(" (dry run)"))
        return None if gpu is None else gpu.name
    return None
