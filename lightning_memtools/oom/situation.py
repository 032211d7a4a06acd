"""The step that failed, as it can be traced again under other circumstances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate, estimate_memory
from lightning_memtools.estimate.batch_sizes import resized
from lightning_memtools.memory.allocator import AllocatorConfig
from lightning_memtools.memory.processes import GpuProcess
from lightning_memtools.oom.facts import Facts
from lightning_memtools.oom.fragmentation import History
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.simulation.precision import PrecisionName
from lightning_memtools.simulation.step import Stage
from lightning_memtools.simulation.step_trace import Forward, TracedStep

_STAGES: dict[str, Stage] = {
    "train": "train",
    "val": "val",
    "sanity check": "val",
    "test": "test",
    "predict": "predict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the checks need to know. Sizes in bytes.

    Attributes:
        facts: What was captured.
        model: The model.
        optimizers: Its optimizers.
        forward: Runs the training step's forward pass on fakes, for planning; None where there is none.
        precision: By Lightning's name; None where it cannot be simulated.
        accumulate: Batches to an optimizer step.
        clip: The norm to which gradients are clipped.
        is_cuda_like: Whether it failed on a GPU with CUDA's allocator, real or simulated.
        cuda: Whether to trace CUDA's operators, or those of the CPU under a simulated device.
        gpu: The name of a GPU to whose kind it belongs, for the size of cuBLAS's workspace; None for those before
            Hopper and for the CPU.
        config: The allocator's settings.
        untraceable: Why steps cannot be traced; "" where they can.
        history: The recorded history; None where none was recorded.
        evaluation_began: The history's time at the start of the evaluation; None in training.
        empties_cache: Whether the cache is emptied before evaluation already.
        plan: The checkpointing plan that was at work.
        processes: Other processes on the device, or why they are not known; None where there is no real device.
        predictions: Bytes of predictions that are held on the device.
    """

    facts: Facts
    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    forward: Forward | None = None
    precision: PrecisionName | None = "32-true"
    accumulate: int = 1
    clip: float | None = None
    is_cuda_like: bool = False
    cuda: bool = False
    gpu: str | None = None
    config: AllocatorConfig = field(default_factory=AllocatorConfig)
    untraceable: str = ""
    history: History | None = None
    evaluation_began: int | None = None
    empties_cache: bool = False
    plan: CheckpointPlan | None = None
    processes: Sequence[GpuProcess] | str | None = None
    predictions: int = 0

    @property
    def stage(self) -> Stage | None:
        """The stage as the estimator calls it; None where no step had begun."""
        return _STAGES.get(self.facts.moment.stage)

    @property
    def usable(self) -> int | None:
        """What of the device is left for what a trace shows; None where that is not known."""
        facts, split = self.facts, self.facts.split
        if facts.stats.capacity is None or split is None:
            return None
        capacity = facts.stats.capacity
        return min(capacity - (facts.used_by_others or 0), int(facts.fraction * capacity)) - self.untraced

    @property
    def untraced(self) -> int:
        """What this process holds beside what a trace of the step shows."""
        split = self.facts.split
        if split is None:
            return 0
        if self.stage == "train":
            return split.older
        return split.older + split.by_category["gradients"] + split.by_category["optimizer"]

    def why_not_traced(self) -> str:
        """Why no step can be traced; "" where it can."""
        if self.untraceable:
            return self.untraceable
        if self.stage is None:
            return "no step had begun"
        if self.facts.batch is None or self.facts.samples is None:
            return "the batch was not seen"
        if self.precision is None:
            return "its precision is not simulated"
        return ""

    def estimate(
        self,
        size: int | None = None,
        *,
        precision: PrecisionName | None = None,
        accumulate: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        plan: CheckpointPlan | None = None,
    ) -> MemoryEstimate:
        """Trace the failed step again, with something changed.

        Args:
            size: The batch size.
            precision: The precision.
            accumulate: Batches to an optimizer step.
            optimizer: Makes another optimizer.
            plan: What to recompute.

        Raises:
            Exception: Whatever the step raises on fake tensors.
        """
        stage = self.stage
        assert stage is not None
        batch: Any = (
            self.facts.batch if size in {None, self.facts.samples} else resized(self.facts.batch, int(size or 0))
        )
        own = (
            # Without its state: what failed in a step may be half made.
            copy_optimizer(self.optimizers[0], lambda tensor: tensor, with_state=False)
            if len(self.optimizers) == 1
            else None
        )
        applied = plan or self.plan
        # One is still at work where the callback that applied it has not been told of the error yet.
        patched = any("forward" in vars(module) for module in self.model.modules())
        with nullcontext() if applied is None or patched else applied.apply(self.model):
            return estimate_memory(
                self.model,
                batch,
                optimizer=(optimizer or own) if stage == "train" else None,
                stage=stage,
                precision=precision or self.precision or "32-true",
                # More batches to a step than two take the same memory as two.
                accumulate=min(accumulate or self.accumulate, 2) if stage == "train" else 1,
                clip=self.clip,
                device="cuda" if self.cuda else "cpu",
                allocator=self.config.to_string(),
                capacity=self.gpu,
            )

    def step(self) -> TracedStep:
        """The training step, to plan for."""
        assert self.forward is not None
        return TracedStep(
            self.model, self.facts.batch, self.forward, tuple(self.optimizers), device="cuda" if self.cuda else "cpu"
        )
