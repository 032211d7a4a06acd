"""From a Trainer whose step ran out of memory to what can be traced again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.memory.allocator import AllocatorConfig, cublas_workspace_bytes
from lightning_memtools.memory.owned import OnDevice, block_bytes, storage_of
from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.facts import Facts
from lightning_memtools.oom.fragmentation import History
from lightning_memtools.oom.situation import Situation
from lightning_memtools.simulation.fake_training_step import forward_of
from lightning_memtools.simulation.precision import PrecisionName


def situation_of(
    trainer: Trainer,
    pl_module: LightningModule,
    facts: Facts,
    *,
    virtual: VirtualDevice | None,
    snapshot: dict[str, Any] | None,
    evaluation_began: int | None,
    on_device: OnDevice,
) -> Situation:
    """What the checks need to know of a run."""
    device = trainer.strategy.root_device
    config = replace(_settings(virtual, snapshot), per_process_memory_fraction=facts.fraction)
    history = None
    if snapshot is not None and facts.stats.capacity is not None:
        history = History(snapshot, config, facts.stats.capacity, facts.used_by_others or 0, device.index or 0)
    precision: Any = trainer.precision if trainer.precision in get_args(PrecisionName) else None
    return Situation(
        facts=facts,
        model=pl_module,
        optimizers=tuple(trainer.optimizers),
        forward=forward_of(trainer, pl_module, facts.moment.batch_idx or 0),
        precision=precision,
        accumulate=trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1,
        clip=trainer.gradient_clip_val if pl_module.automatic_optimization else None,
        is_cuda_like=device.type == "cuda" or virtual is not None,
        cuda=device.type == "cuda" or (virtual is not None and virtual.cuda_like),
        gpu=_kind_of(device),
        config=config,
        untraceable=_why_not(trainer, pl_module),
        history=history,
        evaluation_began=evaluation_began,
        empties_cache=any(type(callback).__name__ == "EmptyCache" for callback in _callbacks(trainer)),
        plan=_plan(trainer),
        processes=processes_of(device, virtual, facts),
        predictions=_predictions(trainer, on_device),
    )


def processes_of(
    device: torch.device, virtual: VirtualDevice | None, facts: Facts
) -> Sequence[GpuProcess] | str | None:
    """Who else holds memory of the device; None where that is no question."""
    if virtual is not None:
        others = (facts.used_by_others or 0) - virtual.context_bytes
        return [GpuProcess(0, "others (simulated)", others)] if others > 0 else []
    if device.type == "cuda":
        return other_gpu_processes(device.index or 0)
    return None


def _kind_of(device: torch.device) -> str | None:
    """The known GPU that stands for all with cuBLAS workspaces as large as Hopper's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    is_large = cublas_workspace_bytes(compute_capability=capability) > cublas_workspace_bytes()
    return "H100 80GB" if is_large else None


def _settings(virtual: VirtualDevice | None, snapshot: dict[str, Any] | None) -> AllocatorConfig:
    if virtual is not None:
        return virtual.settings
    told = (snapshot or {}).get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF")
    text = told or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return AllocatorConfig.parse(text)
    except ValueError:  # of another backend, or newer than this library
        return AllocatorConfig()


def _why_not(trainer: Trainer, pl_module: LightningModule) -> str:
    strategy = type(trainer.strategy).__name__
    if any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel")):
        return f"{strategy} shards the model, and one rank alone cannot trace a step of it"
    if vars(pl_module).get("_compiler_ctx") is not None or is_compiled(pl_module):
        return "the model is compiled, and a trace would show its eager memory"
    return ""


def _plan(trainer: Trainer) -> CheckpointPlan | None:
    plans = [getattr(callback, "plan", None) for callback in _callbacks(trainer)]
    return next((plan for plan in plans if isinstance(plan, CheckpointPlan) and plan.refused is None), None)


def _predictions(trainer: Trainer, on_device: OnDevice) -> int:
    if trainer.state.fn != TrainerFn.PREDICTING:
        return 0
    seen: set[int] = set()
    total = 0
    for leaf in tree_leaves(trainer.predict_loop.predictions):
        found = storage_of(leaf) if isinstance(leaf, Tensor) and on_device(leaf) else None
        if found is not None and found[0] not in seen:
            seen.add(found[0])
            total += block_bytes(found[1])
    return total


def _callbacks(trainer: Trainer) -> Sequence[Any]:
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    return callbacks
