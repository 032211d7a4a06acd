"""OOMReport: what filled the device when memory ran out, and what would have helped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import (
    callbacks_of,
    forget_batch,
    is_compiled_by_lightning,
    part_of_lightning,
    running_hook,
    running_stage,
    training_step,
    untoggle_all,
)
from lightning_memtools.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memtools.callbacks.guarded import WatchingCallback, watched
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.memory.error_frames import forget_frames
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.release_failed_step import release_cached
from lightning_memtools.memory.virtual import put_on_device
from lightning_memtools.oom.actions import Action
from lightning_memtools.oom.failed_step import FailedRun
from lightning_memtools.oom.failure_capture import FailureCapture
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment
from lightning_memtools.oom.oom_reporter import OOMReporter
from lightning_memtools.recovery.batch_parts import CannotSplitError, n_samples_of
from lightning_memtools.recovery.step_recovery import norms_of, why_norm_prevents
from lightning_memtools.reporting.files import fixed_directory, report_directory
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported


class OOMReport(WatchingCallback):
    """Explains an out-of-memory error: what filled the device, and which of the changes it tried would have helped.

    When fit, validate, test or predict runs out of memory, a report is written, and the error is raised. The report
    holds the allocated bytes by category, the modules with the most activations, whether fragmentation was the cause,
    and the suggested changes, best first. Numbers are given only for changes that were tried: by tracing the failed
    step on fake tensors, or by replaying the recorded history of the allocator.

    | written to | what |
    | --- | --- |
    | `<log_dir>/memtools/oom-<stage>-step<n>.md` | the report |
    | `<log_dir>/memtools/oom-<stage>-step<n>-snapshot.pickle` | the memory snapshot, with `snapshot=True` |
    | `memtools/oom_report` in loggers that take text | the report |
    | the console | the report's first lines; the report's path, as a note on the error |

    On CUDA and on a VirtualDevice the data is captured at the moment of failure, before the stack unwinds. Elsewhere
    it is captured from the exception, while the frames of the failed step still exist. Out-of-memory errors that
    your code catches are not reported.

    Costs: a counter is read once per batch. With `snapshot`, PyTorch records each allocation, which takes
    3 microseconds, and keeps the last 50,000 on the host. A report takes less than 10 s of CPU time and allocates
    nothing on the device. After 8 s no further change is tried: the report names the changes that were left out.

    Args:
        directory: Where reports go, instead of `<log_dir>/memtools/`.
        snapshot: Record the allocator's history, and write it beside the report as a memory snapshot for
            https://pytorch.org/memory_viz. Without it, fragmentation cannot be judged.
    """

    takes_part_in_trials = False
    page = "oom-report"
    documented = (torch.OutOfMemoryError,)  # a model may not fit on the VirtualDevice that it is put on
    parts_of_a_run = ("_capture", "_reporter")

    def __init__(self, *, directory: str | None = None, snapshot: bool = True) -> None:
        self.directory = directory
        self._reports_to = fixed_directory(directory)
        self.snapshot = snapshot
        # A dry run sets the one and reads the other.
        self.checks_seconds: float | None = None
        self.advice: tuple[Action, ...] = ()
        self._capture: FailureCapture | None = None
        self._reporter: OOMReporter

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the device to be called when it runs out of memory."""
        self.stop_watching()
        directory = report_directory(trainer, self._reports_to)
        self._reporter = OOMReporter(directory, self.checks_seconds)
        place, optimizers = partial(_place_of, trainer), lambda: trainer.optimizers
        device = trainer.strategy.root_device
        self._capture = FailureCapture(device, pl_module, place, optimizers, snapshot=self.snapshot)

    # --- following the run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On a simulated VirtualDevice, count the model's memory as allocated."""
        put_on_device(pl_module, trainer.optimizers)

    on_train_start = on_fit_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """On a simulated VirtualDevice, count the model's memory as allocated. Record when the evaluation begins."""
        put_on_device(pl_module, trainer.optimizers)
        self._following.begin_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record which batch is about to run."""
        self._following.begin_batch("train", batch, batch_idx, "forward")

    def on_before_backward(self, *args: Any) -> None:
        """Record that the backward pass begins."""
        self._following.phase = "backward"

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that the backward pass has ended."""
        self._following.phase = "optimizer step" if pl_module.automatic_optimization else "forward"

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Record that the optimizer's step begins."""
        self._following.phase = "optimizer step"

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Drop the reference to the batch."""
        self._following.end_batch()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record which batch is about to run."""
        self._following.begin_batch(running_stage(trainer), batch, batch_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    # --- reporting

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write a report if the exception is an out-of-memory error."""
        if self._capture is not None and is_out_of_memory(exception):
            try:
                facts = self._capture.facts_of(exception)
                # What is still there then is not the step's.
                forget_frames(exception)
                forget_batch(trainer)
                untoggle_all(pl_module)
                self.advice = self._report(trainer, facts, error=exception)
            finally:
                pl_module.zero_grad()
                release_cached(trainer.strategy.root_device)
        self.stop_watching()

    @watched
    def report_recovered(self, trainer: Trainer, done: str) -> None:
        """Write a report on a step that ran out of memory and was repeated. OOMRecovery calls this once per run.

        Args:
            trainer: The Trainer.
            done: A sentence on how the step was recovered, for the report.
        """
        if self._following.captured is not None:
            self._report(trainer, self._following.captured, done=done)

    def _report(
        self, trainer: Trainer, facts: FailureFacts, *, error: BaseException | None = None, done: str = ""
    ) -> tuple[Action, ...]:
        """Write and log a report on a step that ran out of memory, and return the suggested changes."""
        capture, run = self._following, partial(_failed_run_of, trainer, facts.batch)
        # Memory that runs out while a report is made must not replace the facts that it is about.
        capture.is_reporting = True
        try:
            page = self._reporter.report(facts, capture, run, error=error, done=done)
        finally:
            capture.is_reporting = False
        log_text(trainer, "memtools/oom_report", page.markdown(), training_step(trainer))
        return tuple(page.advice.actions)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop observing the device's memory."""
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop observing the device's memory. Idempotent."""
        if self._capture is not None:
            self._capture.stop()
        self._capture = None

    @property
    def _following(self) -> FailureCapture:
        assert self._capture is not None, "setup comes before every other hook"
        return self._capture


def _place_of(trainer: Trainer) -> FailureMoment:
    """Return the current stage, step, rank and hook of a run. The batch and the phase are left unset."""
    stage, step, rank = running_stage(trainer), training_step(trainer), trainer.global_rank
    return FailureMoment(stage, step, rank=rank, world_size=trainer.world_size, hook=running_hook())


def _failed_run_of(trainer: Trainer, batch: Any) -> FailedRun:
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
