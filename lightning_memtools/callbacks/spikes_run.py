"""LossSpikes in one fit: judges the losses and norms that HaltOnNaN reads, and reports, skips or rolls back."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_memtools._lightning import LoopMarker, gradient_scaler, is_accumulating, training_step
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.guarded_step import GuardedStep
from lightning_memtools.nonfinite.loss_spike import LossSpike, LossSpikeError
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.spike_window import SpikeWindow
from lightning_memtools.state.state_snapshot import StateSnapshot
from lightning_memtools.warning_categories import FindingWarning

if TYPE_CHECKING:
    from lightning_memtools.callbacks.loss_spikes import LossSpikes


@dataclass(frozen=True, slots=True)
class _RollbackPoint:
    """A copy of the training state in host memory, to which a rollback returns."""

    snapshot: StateSnapshot
    restore_loop: Callable[[], None]
    n_steps: int  # the steps before it
    n_updates: int  # the updates before it


class SpikesRun:
    """Does the work of LossSpikes in one fit, on each rank: finds and reports spikes, and skips or rolls back."""

    def __init__(self, trainer: Trainer, module: LightningModule, options: LossSpikes) -> None:
        self._trainer, self._module, self._options = trainer, module, options
        self.spikes: list[LossSpike] = []  # so far
        # One for the losses of each optimizer, and one for its norms.
        self._windows: dict[tuple[int, str], SpikeWindow] = defaultdict(
            lambda: SpikeWindow(
                size=options.window,
                warm_up=options.warm_up,
                sensitivity=options.sensitivity,
                least_ratio=options.least_ratio,
            )
        )
        self._directory = report_directory(trainer, options.reports_to)
        self._point: _RollbackPoint | None = None
        self._last_step = -1  # of the latest spike
        self._goes_back = False

    def judge(self, step: GuardedStep) -> bool:
        """Check a step for a spike, report the spike if there is one, and return whether to skip the step's update.

        Raises:
            LossSpikeError: The step has a spike, and `max_actions` others were already skipped or rolled back.
        """
        options, loss, norm = self._options, step.worst_loss, step.norm
        index = next((i for i, each in enumerate(self._trainer.optimizers) if each is step.optimizer), 0)
        loss_spike = self._windows[index, "loss"].judge(loss)
        norm_spike = self._windows[index, "norm"].judge(norm)
        if loss_spike is None and norm_spike is None:
            return False
        groups = step.optimizer.param_groups if step.optimizer is not None else ()
        spike = LossSpike(
            step=step.number,
            batches=tuple(micro.index for micro in step.micro),
            loss=loss,
            norm=norm,
            loss_spike=loss_spike,
            norm_spike=norm_spike,
            learning_rates=tuple(float(group["lr"]) for group in groups if "lr" in group),
        )
        is_new = self._last_step < 0 or step.number - self._last_step > options.window
        self._last_step = step.number
        halts = options.action != "report" and len(self.spikes) >= options.max_actions
        if options.action != "report":
            spike = self._with_action(spike, halts=halts)
        if is_new or halts:
            spike = self._tell(spike)
        self.spikes.append(spike)
        log_scalars(self._trainer, {"spikes/found": float(len(self.spikes))}, step.number)
        if halts:
            why = self._directory.reason if isinstance(self._directory, NotWritten) else ""
            raise LossSpikeError(
                f"{spike.headline()} LossSpikes has acted on {options.max_actions} spikes before (max_actions).\n"
                f"Report: {spike.report or why}\n{spike.lines()[-1]}",
                spike,
            )
        return options.action != "report"

    def _with_action(self, spike: LossSpike, *, halts: bool) -> LossSpike:
        if halts:
            return replace(spike, done="halt")
        if self._options.action == "skip" or self._point is None:
            return replace(spike, done="skip")
        self._goes_back = True
        return replace(spike, done="rollback", taken_back=self._trainer.global_step - self._point.n_updates)

    def end_batch(self) -> None:
        """Roll back if the batch had a spike. Otherwise, if a copy is due, copy the state for later rollbacks."""
        if self._goes_back and self._point is not None:
            self._goes_back = False
            self._point.snapshot.restore()
            self._point.restore_loop()
        elif not is_accumulating(self._trainer):
            n_steps = training_step(self._trainer) + 1  # this one included
            before = 0 if self._point is None else self._point.n_steps
            # Weights change fast at first: the intervals begin with one step, and double.
            if n_steps - before >= min(self._options.every_n_steps, max(before, 1)) and self._last_step < n_steps - 1:
                self._take_point(n_steps)

    def begin_epoch(self) -> None:
        """With action="rollback", copy the training state, so that no rollback goes back to an earlier epoch."""
        self._take_point(training_step(self._trainer))

    def _take_point(self, n_steps: int) -> None:
        trainer = self._trainer
        if self._options.action != "rollback":
            return
        self._point = None  # its memory is free for the next one
        roots = [self._module, *trainer.optimizers, gradient_scaler(trainer)]
        data = (DataLoader, Dataset)  # they go on: the batches since then are left out
        self._point = _RollbackPoint(
            StateSnapshot(roots, skip=(type(trainer), *data), host=host_memory),
            LoopMarker(trainer).mark_updates(),
            n_steps,
            trainer.global_step,
        )

    def _tell(self, spike: LossSpike) -> LossSpike:
        """Warn, and write the report on a spike, on rank 0. On every rank, return the spike with the report's path."""
        name, written = f"loss-spike-step{spike.step}-report.md", self._directory
        if self._trainer.is_global_zero:
            written = write_report(self._directory, name, spike.markdown())
            log_text(self._trainer, "memtools/loss_spike", spike.markdown(), spike.step)
            if spike.done != "halt":  # the error says it
                warnings.warn(f"{spike.headline()} {spike.action()} {spike.lines()[-1]}", FindingWarning, stacklevel=2)
        elif isinstance(written, Path):
            written /= name
        return replace(spike, report=written if isinstance(written, Path) else None)
