"""LossSpikes in one fit: judges what HaltOnNaN has read, keeps a point to go back to, reports, skips, rolls back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import LoopMarker, gradient_scaler, is_accumulating, training_step
from lightning_memtools.callbacks.guarded import unless_it_fails, warn_of
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.guarded_step import GuardedStep
from lightning_memtools.nonfinite.loss_spike import LossSpike, LossSpikeError, SpikeAction, SpikeDetector
from lightning_memtools.nonfinite.step_guard import HeldBackStep, StepGuard
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.state.state_snapshot import StateSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeOptions:
    """The arguments of LossSpikes; its docstring explains each.

    Raises:
        ValueError: One of them is none of its values.
    """

    action: SpikeAction = "report"
    max_actions: int = 3
    window: int = 100
    warm_up: int = 50
    sensitivity: float = 4.0
    least_ratio: float = 1.5
    every_n_steps: int = 100
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.action not in {"report", "skip", "rollback"}:
            raise ValueError(f'action={self.action!r} is none of "report", "skip" and "rollback".')
        for name, least in (("max_actions", 0), ("window", 10), ("warm_up", 5), ("every_n_steps", 1)):
            if not is_count(getattr(self, name), least=least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {getattr(self, name)!r}.")
        if self.warm_up > self.window:
            raise ValueError(f"warm_up={self.warm_up} is never reached in a window of {self.window} steps.")
        for name in ("sensitivity", "least_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 1:
                raise ValueError(f"{name} must be a number above 1, got {value!r}.")

    def detector(self) -> SpikeDetector:
        """Return a detector with these settings."""
        return SpikeDetector(
            window=self.window, warm_up=self.warm_up, sensitivity=self.sensitivity, least_ratio=self.least_ratio
        )


@dataclass(frozen=True, slots=True)
class _RollbackPoint:
    """A state of training in host memory."""

    snapshot: StateSnapshot
    restore_loop: Callable[[], None]
    n_steps: int  # the steps before it
    n_updates: int  # the updates before it


class SpikesRun:
    """LossSpikes in one fit; a ReadingWatch for HaltOnNaN's guard. Make it on every rank.

    Args:
        trainer: The Trainer, as training starts.
        module: The module that is trained.
        options: The arguments of LossSpikes.

    Attributes:
        decides: True if updates may be held back.
        spikes: The spikes so far.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, options: SpikeOptions) -> None:
        self._trainer, self._module, self._options = trainer, module, options
        self.decides = options.action != "report"
        self.spikes: list[LossSpike] = []
        self._detector = options.detector()
        self._directory = report_directory(trainer, options.directory)
        self._loop: LoopMarker | None = None
        self._point: _RollbackPoint | None = None
        self._last_step = -1  # of the latest spike
        self._n_actions = 0
        self._goes_back = False

    def close(self) -> None:
        """Release the copies. Idempotent."""
        self._point = None

    def read(self, guard: StepGuard, step: GuardedStep, loss: float, norm: float, *, is_late: bool) -> bool:
        """Judge a step that HaltOnNaN has read, and return whether its update is to be held back."""
        if self.decides:
            return self._judge(guard, step, loss, norm, is_late=is_late)
        warn = warn_of("LossSpikes could not judge a step")
        return bool(unless_it_fails(lambda: self._judge(guard, step, loss, norm, is_late=is_late), warn))

    def _judge(self, guard: StepGuard, step: GuardedStep, loss: float, norm: float, *, is_late: bool) -> bool:
        index = next((i for i, each in enumerate(self._trainer.optimizers) if each is step.optimizer), 0)
        loss_spike, norm_spike = self._detector.judge(index, loss, norm)
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
            is_late=is_late,
        )
        is_new = self._last_step < 0 or step.number - self._last_step > self._options.window
        self._last_step = step.number
        halts = self.decides and self._n_actions >= self._options.max_actions
        if self.decides:
            self._n_actions += 1
            spike = self._with_action(spike, halts=halts)
        if is_new or halts:
            told = spike
            warn = warn_of("LossSpikes could not write its report")
            spike = unless_it_fails(lambda: self._tell(told), lambda error: warn(error) or told)
        self.spikes.append(spike)
        log_scalars(self._trainer, {"spikes/found": float(len(self.spikes))}, step.number)
        if halts:
            guard.undo(HeldBackStep(step, tuple(float(each) for each in step.losses()), norm))
            why = self._directory.reason if isinstance(self._directory, NotWritten) else ""
            raise LossSpikeError(
                f"{spike.headline()} LossSpikes has acted on {self._options.max_actions} spikes before "
                f"(max_actions).\nReport: {spike.report or why}\n{spike.lines()[-1]}",
                spike,
            )
        return self.decides

    def _with_action(self, spike: LossSpike, *, halts: bool) -> LossSpike:
        if halts:
            return replace(spike, done="halt")
        if self._options.action == "skip" or self._point is None:
            return replace(spike, done="skip")
        self._goes_back = True
        return replace(spike, done="rollback", taken_back=self._trainer.global_step - self._point.n_updates)

    def end_batch(self) -> None:
        """Roll back if the batch had a spike; else copy the state if that is due."""
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
        """Save the training state, so that no rollback goes back beyond the beginning of the epoch."""
        self._take_point(training_step(self._trainer))

    def _take_point(self, n_steps: int) -> None:
        trainer = self._trainer
        if self._options.action != "rollback":
            return
        self._loop = self._loop or LoopMarker(trainer)
        self._point = None  # its memory is free for the next one
        roots = [self._module, *trainer.optimizers, gradient_scaler(trainer)]
        self._point = _RollbackPoint(
            StateSnapshot(roots, skip=(type(trainer),), host=host_memory),
            self._loop.mark_updates(),
            n_steps,
            trainer.global_step,
        )

    def _tell(self, spike: LossSpike) -> LossSpike:
        """Write the report on rank 0, warn, and return the spike with the place of the report on every rank."""
        name, written = f"loss-spike-step{spike.step}-report.md", self._directory
        if self._trainer.is_global_zero:
            written = write_report(self._directory, name, spike.markdown())
            log_text(self._trainer, "memtools/loss_spike", spike.markdown(), spike.step)
            if spike.done != "halt":  # the error says it
                warnings.warn(f"{spike.headline()} {spike.action()} {spike.lines()[-1]}", stacklevel=2)
        elif isinstance(written, Path):
            written /= name
        return replace(spike, report=written if isinstance(written, Path) else None)
