"""The step that failed, with all that the checks need to trace it again, and who holds what it does not need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import tree_leaves
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import resized
from lightning_memtools.estimate.estimator import estimate_step
from lightning_memtools.estimate.memory_estimate import cublas_workspace_of
from lightning_memtools.memory.allocator import AllocatorConfig, cublas_workspace_bytes
from lightning_memtools.memory.allocator.memory_snapshot import config_of
from lightning_memtools.memory.leaks.holdings import BlockNotes, Holdings, find_holdings
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.memory_releaser import free_failed_backward
from lightning_memtools.memory.owned import KnowsItsTensors, OnDevice, block_bytes, cuda_address, storage_of
from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes
from lightning_memtools.memory.release_failed_step import uncounted
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.failure_facts import FailureFacts
from lightning_memtools.oom.fragmentation import maker
from lightning_memtools.oom.recorded_history import RecordedHistory
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.simulation.step_runner import PrecisionName, Recipe, Stage
from lightning_memtools.simulation.step_trace import Forward, TracedStep
from lightning_memtools.simulation.tracer import SimulationSettings, Subject

_STAGES: dict[str, Stage] = {
    "train": "train",
    "val": "val",
    "sanity check": "val",
    "test": "test",
    "predict": "predict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """The facts of a run that the checks need, read from its Trainer.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        trainer: The Trainer; None where there is none.
        forward: Runs the training step's forward pass, where there is no Trainer.
        batch_idx: The index of the batch in its epoch.
        precision: Lightning's name of the precision.
        accumulate: The number of batches per optimizer step.
        can_accumulate: True if the Trainer takes another number of batches per optimizer step.
        clip: The norm to which gradients are clipped; None for no clipping.
        untraceable: The reason why steps cannot be traced; "" where they can.
        is_sharded: True if FSDP 2 shards the model. A trace is then of one device that holds the whole model.
        empties_cache: True if the cache is emptied before evaluation already.
        plan: The checkpoint plan that is applied to the model.
        predictions: The predictions that the run keeps, in any nesting.
        others: What else belongs to the run: callbacks and the data module.
        max_splits: The largest number of parts in which OOMRecovery runs a batch; 1 where it is not on.
        no_recovery: The reason why OOMRecovery would not run its batches in parts; "" where it would.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    trainer: Any = None
    forward: Forward | None = None
    batch_idx: int = 0
    precision: Any = "32-true"
    accumulate: int = 1
    can_accumulate: bool = True
    clip: float | None = None
    untraceable: str = ""
    is_sharded: bool = False
    empties_cache: bool = False
    plan: CheckpointPlan | None = None
    predictions: Any = ()
    others: Sequence[Any] = ()
    max_splits: int = 1
    no_recovery: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStep:
    """The facts of a failed step that the checks need. Sizes in bytes.

    Attributes:
        facts: The facts captured when memory ran out.
        run: The facts read from the Trainer.
        is_cuda_like: True if the step failed on a GPU with CUDA's allocator, real or simulated.
        cuda: True to trace CUDA's operators; False for a CPU's under a simulated device.
        gpu: The name of a GPU with a cuBLAS workspace of the same size; None for GPUs before Hopper and for the CPU.
        config: The allocator's settings.
        history: The recorded history; None where none was recorded.
        evaluation_began: The history's time at the start of the evaluation; None in training.
        processes: Other processes on the device, or the reason why they are not known; None where there is no real
            device.
        predictions: Bytes of predictions that are kept on the device.
        held: Who holds what the step does not need.
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
    predictions: int = 0
    held: Holdings = field(default_factory=Holdings)

    @property
    def stage(self) -> Stage | None:
        """The stage by the estimator's names; None where no step had begun."""
        return _STAGES.get(self.facts.moment.stage)

    @property
    def precision(self) -> PrecisionName | None:
        """The precision; None where it cannot be simulated."""
        name: Any = self.run.precision
        return name if name in get_args(PrecisionName) else None

    @property
    def usable(self) -> int | None:
        """The part of the device that is left for what a trace shows; None where it is not known."""
        facts, split = self.facts, self.facts.split
        if facts.stats.capacity is None or split is None or self.run.is_sharded:
            return None
        capacity = facts.stats.capacity
        return min(capacity - (facts.used_by_others or 0), int(facts.fraction * capacity)) - self.untraced

    @property
    def untraced(self) -> int:
        """The bytes that this process holds and that a trace of the step does not show."""
        split = self.facts.split
        if split is None:
            return 0
        if self.stage == "train":
            return split.older
        return split.older + split.by_category["gradients"] + split.by_category["optimizer"]

    @property
    def may_fuse(self) -> bool:
        """True if a fused optimizer can be used: Lightning refuses to clip its gradients where it scales the loss."""
        return self.is_cuda_like and not (self.precision == "16-mixed" and self.run.clip)

    def why_not_traced(self) -> str:
        """Return the reason why the step cannot be traced; "" if it can."""
        if self.run.untraceable:
            return self.run.untraceable
        if self.stage is None:
            return "no step had begun"
        if self.facts.batch is None or self.facts.samples is None:
            return "the batch is not known"
        if self.precision is None:
            return "its precision is not simulated"
        return ""

    def estimate(
        self,
        size: int | None = None,
        *,
        precision: PrecisionName | None = None,
        accumulate: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | Optimizer | None = None,
        plan: CheckpointPlan | None = None,
    ) -> MemoryEstimate:
        """Trace the failed step again, with something changed.

        Args:
            size: Another batch size.
            precision: Another precision.
            accumulate: Another number of batches per optimizer step.
            optimizer: Another optimizer, or a function that makes it.
            plan: Another checkpoint plan.

        Raises:
            Exception: Whatever the step raises on fake tensors.
        """
        run, stage = self.run, self.stage
        assert stage is not None
        batch: Any = (
            self.facts.batch if size in {None, self.facts.samples} else resized(self.facts.batch, int(size or 0))
        )
        # Without their state, which may be incomplete where a step has failed.
        own = [copy_optimizer(one, lambda tensor: tensor, with_state=False) for one in run.optimizers]
        plan = plan or run.plan
        subject = Subject(
            model=run.model,
            optimizer=(optimizer or own or None) if stage == "train" else None,
            trainer=run.trainer,
        )
        recipe = Recipe(
            stage=stage,
            precision=precision or self.precision or "32-true",
            # More than two batches per step take the same memory as two.
            accumulate=min(accumulate or run.accumulate, 2) if stage == "train" else 1,
            clip=run.clip,
        )
        settings = SimulationSettings(
            cuda=self.cuda,
            # The share that this process may reserve is part of `usable`.
            allocator=replace(self.config, per_process_memory_fraction=1.0).to_string(),
            cublas_workspace=cublas_workspace_of(self.gpu),
            gpu=GpuShape.of(None if self.gpu is None else find_gpu(self.gpu)),
        )
        # A plan is still applied where the callback that applied it has not been told of the error yet.
        is_applied = any("forward" in vars(module) for module in run.model.modules())
        with nullcontext() if plan is None or is_applied else plan.apply(run.model):
            return estimate_step(subject, batch, recipe, settings, self.gpu)

    def step(self) -> TracedStep:
        """Return the training step, to plan for."""
        return TracedStep(
            self.run.model,
            self.facts.batch,
            self.run.forward,
            tuple(self.run.optimizers),
            device="cuda" if self.cuda else "cpu",
            trainer=self.run.trainer,
            batch_idx=self.run.batch_idx,
        )


def failed_step(
    run: FailedRun,
    facts: FailureFacts,
    capture: FailureCapture,
    snapshot: dict[str, Any] | None,
    held: Holdings,
) -> FailedStep:
    """Return the failed step with all that the checks need.

    Args:
        run: The facts read from the Trainer.
        facts: The facts captured when memory ran out.
        capture: The object that captured them.
        snapshot: The memory snapshot; None where none was recorded.
        held: Who holds what the step does not need.
    """
    device, virtual = capture.device, capture.virtual
    config = replace(_settings(virtual, snapshot), per_process_memory_fraction=facts.fraction)
    history = None
    if snapshot is not None and facts.stats.capacity is not None:
        history = RecordedHistory(snapshot, config, facts.stats.capacity, facts.used_by_others or 0, device.index or 0)
    return FailedStep(
        facts=facts,
        run=run,
        is_cuda_like=device.type == "cuda" or virtual is not None,
        cuda=device.type == "cuda" or (virtual is not None and virtual.cuda_like),
        gpu=_gpu_like(device),
        config=config,
        history=history,
        evaluation_began=capture.evaluation_began,
        processes=processes_of(device, virtual, facts),
        predictions=_bytes_on_device(run.predictions, capture.on_device),
        held=held,
    )


def processes_of(
    device: torch.device, virtual: VirtualDevice | None, facts: FailureFacts
) -> Sequence[GpuProcess] | str | None:
    """Return the other processes on the device, or the reason why they are not known; None without a GPU."""
    if virtual is not None:
        others = (facts.used_by_others or 0) - virtual.context_bytes
        return [GpuProcess(0, "others (simulated)", others)] if others > 0 else []
    if device.type == "cuda":
        return other_gpu_processes(device.index or 0)
    return None


def _gpu_like(device: torch.device) -> str | None:
    """Return the name of a GPU whose cuBLAS workspace is as large as Hopper's, if the device's is; else None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    is_large = cublas_workspace_bytes(compute_capability=capability) > cublas_workspace_bytes()
    return "H100 80GB" if is_large else None


def _settings(virtual: VirtualDevice | None, snapshot: dict[str, Any] | None) -> AllocatorConfig:
    if virtual is not None:
        return virtual.settings
    return config_of(snapshot or {})


def _bytes_on_device(thing: Any, on_device: OnDevice) -> int:
    seen: set[int] = set()
    total = 0
    for leaf in tree_leaves(thing):
        found = storage_of(leaf) if isinstance(leaf, Tensor) and on_device(leaf) else None
        if found is not None and found[0] not in seen:
            seen.add(found[0])
            total += block_bytes(found[1])
    return total


HOLDERS_S = 3.0
"""Processor time after which no further holder is looked for."""


def held_memory(run: FailedRun, capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> Holdings:
    """Return who holds what lies on the device beside the model, its optimizers and the batch.

    Args:
        run: The facts of the run.
        capture: The object that captured the facts.
        snapshot: The memory snapshot; None where nothing was recorded.
    """
    if capture.reader is None:
        return Holdings()
    # Copies that a search makes of nothing are host memory, and so is what it frees for autograd.
    with uncounted():
        free_failed_backward()
    scope = SearchScope.around(run.model, run.others, run.trainer)
    return find_holdings(
        capture.on_device,
        run.model,
        run.optimizers,
        (capture.batch, run.predictions),
        scope,
        notes=_notes(capture, snapshot),
        seconds=HOLDERS_S,
    )


def _notes(capture: FailureCapture, snapshot: Mapping[str, Any] | None) -> BlockNotes:
    """Return what a snapshot says of the blocks of tensors."""
    if snapshot is None:
        return BlockNotes()
    reader, device, began = capture.reader, capture.device.index or 0, capture.batch_began

    def address_of(tensor: Tensor) -> int | None:
        return reader.address_of(tensor) if isinstance(reader, KnowsItsTensors) else cuda_address(tensor)

    young: set[int] = set()
    for entry in reversed(snapshot["device_traces"][device] if began is not None else ()):
        if entry["time_us"] < (began or 0):
            break
        if entry["action"] == "alloc":
            young.add(entry["addr"])
    frames: dict[int, Any] = {}
    for segment in snapshot["segments"]:
        if segment["device"] == device:
            at = segment["address"]
            for block in segment["blocks"]:
                frames[block.get("address", at)] = block.get("frames") or ()
                at += block["size"]
    return BlockNotes(
        lambda tensor: address_of(tensor) in young, lambda tensor: maker(frames.get(address_of(tensor) or 0, ()))
    )
