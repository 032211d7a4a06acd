"""LossSpikes: a finite loss or gradient norm far outside its recent range."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_memtools._lightning import LoopMarker, callbacks_of, gradient_scaler, is_accumulating, training_step
from lightning_memtools.callbacks.guarded import WatchingCallback, watched
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.loss_spike import LossSpike, LossSpikeError, SpikeAction
from lightning_memtools.nonfinite.step_guard import GuardedStep, ReadingWatch
from lightning_memtools.reporting.files import NO_RUN, NotWritten, fixed_directory, report_directory, write_report
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.spike_window import SpikeWindow
from lightning_memtools.state.state_snapshot import StateSnapshot
from lightning_memtools.warning_categories import FindingWarning


@dataclass(frozen=True, slots=True)
class _RollbackPoint:
    """A copy of the training state in host memory, to which a rollback returns."""

    snapshot: StateSnapshot
    restore_loop: Callable[[], None]
    n_steps: int  # the steps before it
    n_updates: int  # the updates before it


class LossSpikes(WatchingCallback):
    """Reports steps whose loss or gradient norm is far above earlier ones, and can skip them or roll back.

    It uses the losses and gradient norms that HaltOnNaN reads. If the Trainer has no HaltOnNaN, one is added for the
    fit, and training stops at a NaN. A value is a spike if, on a log scale, it exceeds the median of the last `window`
    steps by more than `sensitivity` times the distance from that median to the 95% quantile of these steps. All ranks
    use the same values: the norm over all gradients, and the largest loss of any rank.

    | logged | when |
    | --- | --- |
    | `spikes/found` | the number of spikes so far, at each spike |
    | `memtools/loss_spike` | the report of a spike, to loggers that take text |

    A spike gives a warning, and a report in `<log_dir>/memtools/`, unless the `window` steps before it had a spike.

    With `action="report"`, nothing waits for the device beyond what HaltOnNaN reads. With "skip" and "rollback", the
    host waits for the losses and norms before each update.

    Args:
        action: "report" changes nothing in training. "skip" leaves out the update; the step still counts for
            schedulers. "rollback" restores weights, optimizers, schedulers, gradient scaler and random states from a
            copy in host memory, and goes on with the next batch: batches since the copy are not used again.
        max_actions: The number of spikes to skip or roll back; the next one ends the run with LossSpikeError.
        window: The number of recent steps that a loss or norm is compared with.
        warm_up: The number of steps at the start that are not checked for spikes.
        sensitivity: A smaller number finds smaller spikes. For Gaussian noise, 4 means 6.6 standard deviations.
        least_ratio: A value that is less than this many times the median is no spike.
        every_n_steps: For "rollback": the number of steps between two copies of the state. A copy is also made at
            the start of each epoch.
        directory: Where reports go, instead of `<log_dir>/memtools/`.

    Attributes:
        spikes: The spikes of the latest fit, each a `LossSpike`.

    Raises:
        ValueError: An argument has a value that is not accepted.
        LossSpikeError: From the hooks, at the first spike after `max_actions` skips or rollbacks, before the update.
    """

    parts_of_a_run = ("_windows", "_point", "_halt", "_own")
    takes_part_in_trials = False
    documented = (LossSpikeError,)
    page = "loss-spikes"

    def __init__(
        self,
        *,
        action: SpikeAction = "report",
        max_actions: int = 3,
        window: int = 100,
        warm_up: int = 50,
        sensitivity: float = 4.0,
        least_ratio: float = 1.5,
        every_n_steps: int = 100,
        directory: str | None = None,
    ) -> None:
        if action not in {"report", "skip", "rollback"}:
            raise ValueError(f'action={action!r} is none of "report", "skip" and "rollback".')
        counts = {"max_actions": (max_actions, 0), "window": (window, 10), "warm_up": (warm_up, 5),
                  "every_n_steps": (every_n_steps, 1)}  # fmt: skip
        for name, (value, least) in counts.items():
            if not is_count(value, least=least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if warm_up > window:
            raise ValueError(f"warm_up={warm_up} is never reached in a window of {window} steps.")
        for name, factor in (("sensitivity", sensitivity), ("least_ratio", least_ratio)):
            if not isinstance(factor, int | float) or not factor > 1:
                raise ValueError(f"{name} must be a number above 1, got {factor!r}.")
        self.action, self.max_actions, self.every_n_steps = action, max_actions, every_n_steps
        self.window, self.warm_up, self.sensitivity, self.least_ratio = window, warm_up, sensitivity, least_ratio
        self.directory = directory
        self.reports_to = fixed_directory(directory)
        self.spikes: list[LossSpike] = []
        self._halt: HaltOnNaN | None = None
        self._own: HaltOnNaN | None = None
        self._directory: Path | NotWritten = NO_RUN
        # One for the losses of each optimizer, and one for its norms.
        self._windows: defaultdict[tuple[int, str], SpikeWindow]
        self._point: _RollbackPoint | None = None
        self._last_step = -1  # of the latest spike
        self._goes_back = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Subscribe to the losses and gradient norms that HaltOnNaN reads."""
        self.stop_watching()
        if stage != "fit":
            return
        self._halt = next((each for each in callbacks_of(trainer) if isinstance(each, HaltOnNaN)), None)
        if self._halt is None:
            self._halt = self._own = HaltOnNaN(directory=self.reports_to)
            callbacks_of(trainer).append(self._own)  # the loop that has called this hook goes on with it
        self.spikes, self._last_step, self._goes_back = [], -1, False
        self._windows = defaultdict(self._new_window)
        self._directory = report_directory(trainer, self.reports_to)
        self._halt.watch = ReadingWatch(self.action != "report", partial(self._read, trainer))

    def _new_window(self) -> SpikeWindow:
        return SpikeWindow(
            size=self.window, warm_up=self.warm_up, sensitivity=self.sensitivity, least_ratio=self.least_ratio
        )

    @watched
    def _read(self, trainer: Trainer, step: GuardedStep) -> bool:
        """Check a finite step for a spike, report the spike if there is one, and return whether to skip the update.

        HaltOnNaN calls this.

        Raises:
            LossSpikeError: The step has a spike, and `max_actions` others were already skipped or rolled back.
        """
        loss, norm = step.worst_loss, step.norm
        index = next((i for i, each in enumerate(trainer.optimizers) if each is step.optimizer), 0)
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
        is_new = self._last_step < 0 or step.number - self._last_step > self.window
        self._last_step = step.number
        halts = self.action != "report" and len(self.spikes) >= self.max_actions
        if halts:
            spike = replace(spike, done="halt")
        elif self.action == "rollback" and self._point is not None:
            self._goes_back = True
            spike = replace(spike, done="rollback", taken_back=trainer.global_step - self._point.n_updates)
        elif self.action != "report":
            spike = replace(spike, done="skip")
        if is_new or halts:
            spike = self._tell(trainer, spike)
        self.spikes.append(spike)
        log_scalars(trainer, {"spikes/found": float(len(self.spikes))}, step.number)
        if halts:
            why = self._directory.reason if isinstance(self._directory, NotWritten) else ""
            raise LossSpikeError(
                f"{spike.headline()} LossSpikes has acted on {self.max_actions} spikes before (max_actions).\n"
                f"Report: {spike.report or why}\n{spike.lines()[-1]}",
                spike,
            )
        return self.action != "report"

    def _tell(self, trainer: Trainer, spike: LossSpike) -> LossSpike:
        """Warn, and write the report on a spike, on rank 0. On every rank, return the spike with the report's path."""
        name, written = f"loss-spike-step{spike.step}-report.md", self._directory
        if trainer.is_global_zero:
            written = write_report(self._directory, name, spike.markdown())
            log_text(trainer, "memtools/loss_spike", spike.markdown(), spike.step)
            if spike.done != "halt":  # the error says it
                warnings.warn(f"{spike.headline()} {spike.action()} {spike.lines()[-1]}", FindingWarning, stacklevel=2)
        elif isinstance(written, Path):
            written /= name
        return replace(spike, report=written if isinstance(written, Path) else None)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With action="rollback", copy the training state, so that no rollback goes back to an earlier epoch."""
        self._take_point(trainer, training_step(trainer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Roll back if the step had a spike. Otherwise, if a copy is due, copy the state for later rollbacks."""
        if self._goes_back and self._point is not None:
            self._goes_back = False
            self._point.snapshot.restore()
            self._point.restore_loop()
        elif not is_accumulating(trainer):
            n_steps = training_step(trainer) + 1  # this one included
            before = 0 if self._point is None else self._point.n_steps
            # Weights change fast at first: the intervals begin with one step, and double.
            if n_steps - before >= min(self.every_n_steps, max(before, 1)) and self._last_step < n_steps - 1:
                self._take_point(trainer, n_steps)

    def _take_point(self, trainer: Trainer, n_steps: int) -> None:
        if self.action != "rollback":
            return
        self._point = None  # its memory is free for the next one
        roots = [trainer.lightning_module, *trainer.optimizers, gradient_scaler(trainer)]
        data = (DataLoader, Dataset)  # they go on: the batches since then are left out
        self._point = _RollbackPoint(
            StateSnapshot(roots, skip=(type(trainer), *data), host=host_memory),
            LoopMarker(trainer).mark_updates(),
            n_steps,
            trainer.global_step,
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the copies of the training state, and stop watching."""
        if self._own is not None:
            self._own.on_exception(trainer, pl_module, exception)
        self._leave(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the copies of the training state, and stop watching."""
        if self._own is not None:
            self._own.teardown(trainer, pl_module, stage)
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self._own is not None and self._own in callbacks_of(trainer):
            callbacks_of(trainer).remove(self._own)
        if self._halt is not None:
            self._halt.watch = None
        self._halt = self._own = None
        self.stop_watching()

    def stop_watching(self) -> None:
        """Release the copies of the training state. Idempotent."""
        self._point = None
