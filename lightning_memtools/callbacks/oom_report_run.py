"""The facts of a run that OOMReport reads from the Trainer."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import callbacks_of, is_compiled_by_lightning, running_hook, training_step
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_facts import FailureMoment
from lightning_memtools.recovery.step_recovery import MANUAL_OPTIMIZATION, norms_of, why_norm_prevents
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported


def place_of(trainer: Trainer) -> FailureMoment:
    """Return the present place in the run, but for stage, batch and phase."""
    rank, world_size = trainer.global_rank, trainer.world_size
    return FailureMoment("", training_step(trainer), rank=rank, world_size=world_size, hook=running_hook())


def failed_run_of(trainer: Trainer, batch_idx: int) -> FailedRun:
    """Read the facts that the checks need from the Trainer."""
    callbacks, pl_module = callbacks_of(trainer), trainer.lightning_module
    plans = [callback.plan for callback in callbacks if isinstance(callback, GradientCheckpointing)]
    automatic = pl_module.automatic_optimization
    untraceable = why_unsupported("OOMReport", type(trainer.strategy)) or ""
    if not untraceable and (is_compiled_by_lightning(pl_module) or is_compiled(pl_module)):
        untraceable = "the model is compiled, and a trace would show its eager memory"
    has_schedule = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    return FailedRun(
        model=pl_module,
        optimizers=tuple(trainer.optimizers),
        trainer=trainer,
        batch_idx=batch_idx,
        precision=trainer.precision,
        accumulate=trainer.accumulate_grad_batches if automatic else 1,
        can_accumulate=automatic and not has_schedule,  # Lightning refuses the argument otherwise
        clip=(trainer.gradient_clip_val or None) if automatic else None,  # Lightning takes 0 for no clipping
        untraceable=untraceable,
        plan=next((plan for plan in plans if plan is not None and plan.refused is None), None),
        others=[*callbacks, getattr(trainer, "datamodule", None)],
        no_recovery=_why_no_recovery(trainer),
        predictions=trainer.predict_loop.predictions if trainer.state.fn == TrainerFn.PREDICTING else (),
    )


def _why_no_recovery(trainer: Trainer) -> str:
    """Return a sentence on why OOMRecovery would not run a training batch in parts, or did not; "" where it would."""
    module = trainer.lightning_module
    n_parts = max((one.max_splits for one in callbacks_of(trainer) if isinstance(one, Neighbour)), default=1)
    if n_parts > 1:
        return f"OOMRecovery did not run it in up to {n_parts} parts"
    reason = "" if module.automatic_optimization else MANUAL_OPTIMIZATION
    reason = reason or why_unsupported("OOMRecovery", type(trainer.strategy)) or why_norm_prevents(norms_of(module))
    return reason and f"OOMRecovery would not split it: {reason}"
