"""The facts of a failed run that OOMReport reads from the Trainer."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memtools._lightning import callbacks_of, is_compiled_by_lightning, running_hook, training_step
from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_capture import RunProgress
from lightning_memtools.recovery.step_recovery import MANUAL_OPTIMIZATION, norms_of, why_norm_prevents
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported


def progress_of(trainer: Trainer) -> RunProgress:
    """Return the present place in the run."""
    step, optimizers = training_step(trainer), trainer.optimizers
    return RunProgress(step, trainer.global_rank, trainer.world_size, optimizers, running_hook)


def _why_no_recovery(trainer: Trainer, module: LightningModule) -> str:
    """Return the reason why OOMRecovery would not run training batches in parts; "" where it would."""
    if not module.automatic_optimization:
        return MANUAL_OPTIMIZATION
    return why_unsupported("OOMRecovery", type(trainer.strategy)) or why_norm_prevents(norms_of(module))


def failed_run_of(trainer: Trainer, batch_idx: int) -> FailedRun:
    """Read the facts that the checks need from the Trainer."""
    callbacks, pl_module = callbacks_of(trainer), trainer.lightning_module
    plans = [one.plan for one in callbacks if isinstance(one, GradientCheckpointing)]
    automatic = pl_module.automatic_optimization
    untraceable = why_unsupported("OOMReport", type(trainer.strategy)) or ""
    if not untraceable and (is_compiled_by_lightning(pl_module) or is_compiled(pl_module)):
        untraceable = "the model is compiled, and a trace would show its eager memory"
    return FailedRun(
        model=pl_module,
        optimizers=tuple(trainer.optimizers),
        trainer=trainer,
        batch_idx=batch_idx,
        precision=trainer.precision,
        accumulate=trainer.accumulate_grad_batches if automatic else 1,
        # With either, Lightning refuses the argument.
        can_accumulate=automatic and not any(isinstance(one, GradientAccumulationScheduler) for one in callbacks),
        clip=(trainer.gradient_clip_val or None) if automatic else None,  # Lightning takes 0 for no clipping
        untraceable=untraceable,
        empties_cache=any(isinstance(one, EmptyCache) for one in callbacks),
        plan=next((plan for plan in plans if plan is not None and plan.refused is None), None),
        others=[*callbacks, getattr(trainer, "datamodule", None)],
        max_splits=max((one.max_splits for one in callbacks if isinstance(one, Neighbour)), default=1),
        no_recovery=_why_no_recovery(trainer, pl_module),
        predictions=trainer.predict_loop.predictions if trainer.state.fn == TrainerFn.PREDICTING else (),
    )
