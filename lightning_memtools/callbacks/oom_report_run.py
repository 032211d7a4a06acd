"""The facts of a run that OOMReport reads from the Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import (
    callbacks_of,
    is_compiled_by_lightning,
    part_of_lightning,
    running_hook,
    running_stage,
    training_step,
)
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_facts import FailureMoment
from lightning_memtools.recovery.batch_parts import CannotSplitError, n_samples_of
from lightning_memtools.recovery.step_recovery import norms_of, why_norm_prevents
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported


def place_of(trainer: Trainer) -> FailureMoment:
    """Return the current stage, step, rank and hook of a run. The batch and the phase are left unset."""
    stage, step, rank = running_stage(trainer), training_step(trainer), trainer.global_rank
    return FailureMoment(stage, step, rank=rank, world_size=trainer.world_size, hook=running_hook())


def failed_run_of(trainer: Trainer, batch: Any) -> FailedRun:
    """Return the facts about a failed run on which the suggested changes depend. `batch` is the batch that failed."""
    callbacks, pl_module = callbacks_of(trainer), trainer.lightning_module
    plans = [callback.plan for callback in callbacks if isinstance(callback, GradientCheckpointing)]
    automatic = pl_module.automatic_optimization
    untraceable = why_unsupported("OOMReport", type(trainer.strategy)) or ""
    if not untraceable and (is_compiled_by_lightning(pl_module) or is_compiled(pl_module)):
        untraceable = "the model is compiled, and a trace would show its eager memory"
    scheduler = part_of_lightning("callbacks").GradientAccumulationScheduler
    has_schedule = any(isinstance(callback, scheduler) for callback in callbacks)
    return FailedRun(
        model=pl_module,
        optimizers=tuple(trainer.optimizers),
        trainer=trainer,
        precision=trainer.precision,
        accumulate=trainer.accumulate_grad_batches if automatic else 1,
        can_accumulate=automatic and not has_schedule,  # Lightning refuses the argument otherwise
        clip=(trainer.gradient_clip_val or None) if automatic else None,  # Lightning takes 0 for no clipping
        untraceable=untraceable,
        plan=next((plan for plan in plans if plan is not None and plan.refused is None), None),
        others=[*callbacks, getattr(trainer, "datamodule", None)],
        recovery=_recovery_for(trainer, batch),
    )


def _recovery_for(trainer: Trainer, batch: Any) -> str:
    """Return code for an OOMRecovery that can split this batch. Return "" if none can, or the run already has one."""
    module = trainer.lightning_module
    is_there = any(isinstance(one, Neighbour) and one.max_splits > 1 for one in callbacks_of(trainer))
    is_refused = why_unsupported("OOMRecovery", type(trainer.strategy)) or why_norm_prevents(norms_of(module))
    if is_there or is_refused or not (module.automatic_optimization and trainer.training):
        return ""
    try:
        n_samples_of(batch)
    except CannotSplitError:
        return "OOMRecovery(split_batch=..., loss_weight=...)"
    return 'OOMRecovery(loss="mean")'
