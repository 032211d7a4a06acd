"""LossSpikes: a finite loss or gradient norm far outside its recent range."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import callbacks_of
from lightning_memtools.callbacks.guarded import WatchingCallback, watched
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.callbacks.spikes_run import SpikesRun
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.nonfinite.guarded_step import GuardedStep
from lightning_memtools.nonfinite.loss_spike import LossSpike, LossSpikeError, SpikeAction
from lightning_memtools.nonfinite.step_guard import ReadingWatch
from lightning_memtools.reporting.files import fixed_directory


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

    parts_of_a_run = ("_run", "_halt", "_own")
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
        self._run: SpikesRun | None = None
        self._halt: HaltOnNaN | None = None
        self._own: HaltOnNaN | None = None
        self.spikes: list[LossSpike] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Subscribe to the losses and gradient norms that HaltOnNaN reads."""
        self.stop_watching()
        if stage != "fit":
            return
        self._halt = next((each for each in callbacks_of(trainer) if isinstance(each, HaltOnNaN)), None)
        if self._halt is None:
            self._halt = self._own = HaltOnNaN(directory=self.reports_to)
            callbacks_of(trainer).append(self._own)  # the loop that has called this hook goes on with it
        self._run = SpikesRun(trainer, pl_module, self)
        self.spikes = self._run.spikes
        self._halt.watch = ReadingWatch(self.action != "report", partial(self._read, trainer))

    @watched
    def _read(self, trainer: Trainer, step: GuardedStep) -> bool:
        """Check a finite step for a spike, and return whether to skip its update. HaltOnNaN calls this."""
        return self._run is not None and self._run.judge(step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With action="rollback", copy the training state, so that no rollback goes back to an earlier epoch."""
        if self._run is not None:
            self._run.begin_epoch()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Roll back if the step had a spike. Otherwise, if a copy is due, copy the state for later rollbacks."""
        if self._run is not None:
            self._run.end_batch()

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
        self._run = None
