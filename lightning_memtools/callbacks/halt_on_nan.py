"""HaltOnNaN: no NaN and no Inf reaches the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools.callbacks.guarded import WatchingCallback, watched
from lightning_memtools.callbacks.halt_run import HaltRun
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from lightning_memtools.nonfinite.loss_spike import LossSpikeError
from lightning_memtools.nonfinite.step_guard import (
    ExchangedError,
    HiddenGradientsError,
    ReadingWatch,
    gradients_under,
)
from lightning_memtools.reporting.files import fixed_directory


class HaltOnNaN(WatchingCallback):
    """Stops training when a loss or gradient is NaN or Inf, before the weights are updated, and says why.

    All gradients (before clipping) and the losses of all micro-batches are checked between backward and update. At a
    step with NaN or Inf (a bad step), all ranks raise `NonFiniteError` with a diagnosis. By then, weights, optimizer
    state and buffers have their values from before the step, bit for bit. No checkpoint holds NaN or Inf.

    | logged | when |
    | --- | --- |
    | `nonfinite/skipped` | the number of skipped steps, at each skipped step (`max_skips`) |
    | `memtools/nonfinite_report` | the report, at the end of a bad run, to loggers that take text |

    `<log_dir>/memtools/` also gets the report, the last good checkpoint, and a file of the bad step for `replay`.

    With fused SGD, Adam, AdamW or Adagrad (`fused=True`) on a GPU and without a gradient scaler, nothing waits for the
    device. A flag on the device prevents the updates of the bad step and of all later steps; the host reads the flag
    one step later. In all other cases the host reads a few hundred bytes in each step, and waits for them.

    A validation or test run must not log NaN or Inf under a name that contains "loss".

    Args:
        max_skips: The number of bad steps to skip (logged as `nonfinite/skipped`) before a bad step ends the run. A
            skipped step still counts as a step for schedulers.
        amp_patience: With 16-mixed: if the gradient scaler skips this many steps in a row, the last of them counts as
            bad. A scale that starts at 65536 needs at most 16 skips to come down to 1.
        save_last_good: Before raising, write a checkpoint of the state that training had before the bad step.
        explain: Before raising, run the bad step three to five times, to name the operation that made the first NaN
            or Inf. Everything is restored afterwards. This takes host memory for a copy of the module.
        save_step: Before raising, write the bad step to a file, for `replay` to run it again.
        directory: Where the report and the other files go, instead of `<log_dir>/memtools/`. Without a logger, nothing
            is written unless this is set.

    Attributes:
        watch: A function to call with each step without NaN or Inf; LossSpikes sets it before training starts.

    Raises:
        ValueError: `max_skips` is negative or `amp_patience` is below 1; or the strategy hides gradients (at setup).
        NonFiniteError: From the hooks, when a step or an evaluation run is bad.
    """

    takes_part_in_trials = False
    documented = (NonFiniteError, LossSpikeError, HiddenGradientsError)
    page = "halt-on-nan"
    parts_of_a_run = ("_run", "watch")

    def __init__(
        self,
        *,
        max_skips: int = 0,
        amp_patience: int = 20,
        save_last_good: bool = True,
        explain: bool = True,
        save_step: bool = True,
        directory: str | None = None,
    ) -> None:
        if not is_count(max_skips, least=0):
            raise ValueError(f"max_skips={max_skips!r} is not a number of steps. Use 0 to halt at the first bad step.")
        if not is_count(amp_patience):
            raise ValueError(
                f"amp_patience={amp_patience!r} is not a number of steps. Use 1 to halt at the first skip."
            )
        self.max_skips, self.amp_patience = max_skips, amp_patience
        self.save_last_good, self.explain, self.save_step = save_last_good, explain, save_step
        self.directory = directory
        self.reports_to = fixed_directory(directory)
        self._run: HaltRun | None = None
        self.watch: ReadingWatch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect to the other ranks, and find the directory for reports. Raise if gradients cannot be read."""
        self.stop_watching()
        if stage == "fit":
            gradients_under(type(trainer.strategy), world_size=trainer.world_size)
        self._run = HaltRun(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start checking steps and checkpoints for NaN and Inf."""
        before_update, before_saving = partial(self._before_update, trainer), partial(self._before_saving, trainer)
        self._opened().start_training(pl_module, self.watch, before_update, before_saving)

    @watched
    def _before_update(self, trainer: Trainer, optimizer: Optimizer) -> None:
        self._opened().guard.before_update(optimizer)

    @watched
    def _before_saving(self, trainer: Trainer) -> None:
        self._opened().check_before_saving()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch for a diagnosis. If it is the first of an optimizer step, also copy the module's buffers."""
        self._opened().begin(batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss; it is checked later, together with the gradients."""
        self._opened().note_loss(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the step's losses and gradients for NaN and Inf."""
        self._opened().check(optimizer)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Release the batch that was kept for a diagnosis."""
        self._opened().guard.end_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the check results that are still on the device, and raise if a step was bad. Warn if there were none."""
        self._opened().read_rest()
        self._opened().warn_if_blind()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the check results that are still on the device, and raise if a step was bad."""
        self._opened().read_rest()

    on_validation_start = on_test_start = on_train_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if a loss that the evaluation logged is NaN or Inf."""
        self._opened().end_evaluation(pl_module, "test" if trainer.testing else "val")

    on_test_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the latest step if it was bad, because a checkpoint may be written afterwards. Stop watching."""
        if self._run is not None and not isinstance(exception, NonFiniteError):
            self._run.leave_clean_state()
        self.stop_watching()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, and undo all changes to the run."""
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop watching, and undo all changes to the run. Idempotent."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def switch_off(self, error: Exception | str, *, notes_on: BaseException | None = None) -> None:
        """Switch this callback off. If checks are collective, all ranks switch it off together at the next check."""
        guard = self._run.guard if self._run is not None and self._run.is_training else None
        if guard is None or not guard.exchanges or notes_on is not None or isinstance(error, ExchangedError):
            super().switch_off(error, notes_on=notes_on)
        elif not guard.failure:
            guard.failure = error if isinstance(error, str) else in_one_line(error)

    def _opened(self) -> HaltRun:
        assert self._run is not None, "setup makes it"
        return self._run
