"""LossSpikes in one fit: judges what HaltOnNaN has read, keeps points to go back to, reports, skips, rolls back."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import LoopMarker, gradient_scaler, is_accumulating, training_step
from lightning_memtools.callbacks.halt_run import step_conditions
from lightning_memtools.memory.sizes import is_count, parse_size
from lightning_memtools.nonfinite.bad_step import BadStep, GuardedStep, MicroBatch, move_to_host
from lightning_memtools.nonfinite.halt_report import CapsuleNote
from lightning_memtools.nonfinite.loss_spike import (
    LossSpike,
    LossSpikeError,
    SpikeAction,
    SpikeDetector,
    write_spike_capsule,
)
from lightning_memtools.nonfinite.step_guard import StepGuard
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.state.training_point import TrainingPoint

# Files hold the weights twice: a run that spikes all the time must not fill the disk.
_MAX_CAPSULES = 5


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
    capsule: bool = True
    max_bytes: str = "2GiB"
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
        parse_size(self.max_bytes)

    def detector(self) -> SpikeDetector:
        """Return a detector with these settings."""
        return SpikeDetector(
            window=self.window, warm_up=self.warm_up, sensitivity=self.sensitivity, least_ratio=self.least_ratio
        )


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
        self._ranks = RankGather()
        self._directory = report_directory(trainer, options.directory)
        self._loop: LoopMarker | None = None
        # The last two, each with the steps and updates that came before it: the latest may be a step old, and its
        # weights then tell nothing of the updates before a spike.
        self._points: deque[tuple[TrainingPoint, int, int]] = deque(maxlen=2)
        self._other: MicroBatch | None = None
        self._last_micro: MicroBatch | None = None
        self._last_step = -1  # of the latest spike
        self._n_actions = self._n_capsules = 0
        self._goes_back = False
        self._was_late = False

    def close(self) -> None:
        """Release the copies, and disconnect from the other ranks. Idempotent."""
        self._points.clear()
        self._other = self._last_micro = None
        self._ranks.close()

    def read(self, guard: StepGuard, step: GuardedStep, loss: float, norm: float, *, is_late: bool) -> bool:
        """Judge a step that HaltOnNaN has read, and return whether its update is to be held back."""
        self._was_late = self._was_late or is_late
        self._last_micro = step.micro[-1]
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
            spike = self._with_capsule(spike, guard, step)
            spike = self._tell(spike)
        self.spikes.append(spike)
        log_scalars(self._trainer, {"spikes/found": float(len(self.spikes))}, step.number)
        if halts:
            guard.undo(BadStep(step, tuple(float(each) for each in step.losses()), norm, (), late=False))
            raise LossSpikeError(
                f"{spike.headline()} LossSpikes has acted on {self._options.max_actions} spikes before "
                f"(max_actions).\nReport: {spike.report or self._why_no_file()}\n{spike.lines()[-1]}",
                spike,
            )
        return self.decides

    def _with_action(self, spike: LossSpike, *, halts: bool) -> LossSpike:
        if halts:
            return replace(spike, done="halt")
        if self._options.action == "skip":
            return replace(spike, done="skip")
        self._goes_back = True
        return replace(spike, done="rollback", taken_back=self._trainer.global_step - self._points[-1][2])

    def end_batch(self) -> None:
        """Roll back if the batch had a spike; else copy the state if that is due."""
        micro, self._last_micro = self._last_micro, None
        if self._goes_back:
            self._goes_back = False
            self._points[-1][0].restore()
        elif micro is not None and not is_accumulating(self._trainer):
            n_steps = training_step(self._trainer) + 1  # this one included
            before = self._points[-1][1] if self._points else 0
            # Weights change fast at first: the intervals begin with one step, and double.
            if n_steps - before >= min(self._options.every_n_steps, max(before, 1)) and self._last_step < n_steps - 1:
                self._take_point(micro, n_steps)

    def begin_epoch(self) -> None:
        """Save the training state, so that no rollback goes back beyond the beginning of the epoch."""
        self._take_point(None, training_step(self._trainer))

    def _take_point(self, micro: MicroBatch | None, n_steps: int) -> None:
        """Copy what the action and the capsule need: everything, the weights, or nothing."""
        trainer, goes_back, keeps = self._trainer, self._options.action == "rollback", self._keeps_capsules()
        if not goes_back and not keeps:
            return
        self._loop = self._loop or LoopMarker(trainer)
        point = TrainingPoint(
            self._module,
            trainer.optimizers if goes_back else None,
            scaler=gradient_scaler(trainer),
            restore_loop=self._loop.mark_updates(),
        )
        self._points.append((point, n_steps, trainer.global_step))
        if keeps and micro is not None and micro.batch is not None:
            self._other = MicroBatch(micro.index, micro.batch, start=micro.start)
            move_to_host(self._other)

    def _keeps_capsules(self) -> bool:
        """Return whether a capsule may still be written: not where updates are read late, and not without files."""
        is_full = self._n_capsules >= _MAX_CAPSULES
        return self._options.capsule and not is_full and not self._was_late and isinstance(self._directory, Path)

    def _with_capsule(self, spike: LossSpike, guard: StepGuard, step: GuardedStep) -> LossSpike:
        """Write the step on the rank with the largest loss. Collective unless the step was read late."""
        why_not = self._why_no_capsule(spike, guard, step)
        if why_not:
            return replace(spike, note=why_not)
        assert isinstance(self._directory, Path)
        mine = [float(loss) for loss in step.losses()]
        losses = self._ranks.objects(sum(mine) / len(mine) if mine else 0.0)
        writer = max(range(len(losses)), key=losses.__getitem__)
        note = CapsuleNote()
        points = [each for each in self._points if spike.step - each[1] >= self._options.every_n_steps // 4]
        point, n_steps, _ = (points or self._points)[-1]
        if self._ranks.rank == writer:
            note = write_spike_capsule(
                self._directory / f"loss-spike-step{spike.step}-rank{writer}-capsule.pt",
                guard=guard,
                step=step,
                spike=spike,
                module=self._module,
                trainer=self._trainer,
                conditions=step_conditions(self._trainer),
                point=point,
                steps_before=spike.step - n_steps,
                other=self._other,
                max_bytes=parse_size(self._options.max_bytes),
            )
        note = self._ranks.objects(note)[writer if len(losses) > 1 else 0]
        self._n_capsules += 1
        return replace(spike, capsule=note.path, note=note.note)

    def _why_no_capsule(self, spike: LossSpike, guard: StepGuard, step: GuardedStep) -> str:
        if spike.is_late:
            return (
                "the optimizer is fused, so that the spike is known one step late, when the weights have changed; "
                'action="skip" and "rollback" read each step before its update.'
            )
        if not self._options.capsule:
            return "not asked for (capsule=False)."
        if guard.is_sharded:
            return "no rank has all weights."
        if self._n_capsules >= _MAX_CAPSULES:
            return f"{_MAX_CAPSULES} were written before."
        if any(micro.start is None for micro in step.micro):
            return "HaltOnNaN(explain=False, capsule=False) keeps no start of a step."
        return self._why_no_file()

    def _why_no_file(self) -> str:
        return self._directory.reason if isinstance(self._directory, NotWritten) else ""

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
