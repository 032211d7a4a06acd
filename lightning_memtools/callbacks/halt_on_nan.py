"""HaltOnNaN: no NaN and no Inf reaches the weights."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._lightning import (
    LoopMarker,
    forbid_saving_on_exception,
    gradient_scaler,
    guard_saving,
    saves_on_exception,
    training_step,
    untoggle_all,
    values_logged_in_evaluation,
    watch_updates,
    write_checkpoint,
)
from lightning_memtools.callbacks.guarded import WatchingCallback, unless_it_fails, watched
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import names_of
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.nonfinite.bad_step import (
    BadStep,
    HaltStage,
    NonFiniteError,
    as_report,
    bad_optimizer_state,
    bad_state,
    culprit_of,
    evaluation_error,
    examine,
    infer,
    state_error,
    suspects_of_update,
)
from lightning_memtools.nonfinite.explain import run_again
from lightning_memtools.nonfinite.finite_checks import BadTensor
from lightning_memtools.nonfinite.loss_spike import LossSpikeError
from lightning_memtools.nonfinite.step_file import step_as_plain
from lightning_memtools.nonfinite.step_guard import (
    ExchangedError,
    GuardedStep,
    HiddenGradientsError,
    ReadingWatch,
    StepGuard,
    gradients_under,
)
from lightning_memtools.nonfinite.step_rerun import StepConditions, StepRerun
from lightning_memtools.reporting.files import (
    NotWritten,
    fixed_directory,
    report_directory,
    write_file,
    write_report_on_rank_zero,
)
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.loss_names import likely_losses
from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.warning_categories import DegradedWarning, FindingWarning


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


# One rank runs a step several times and reads every operation's outputs, while the others wait.
RERUN_TIMEOUT_S = 600


class HaltRun:
    """Does the work of HaltOnNaN in one Trainer run: checks steps and evaluations, and reports NaN and Inf.

    Create it on every rank. Rank 0 writes the files and sends their paths to the others. No rank waits for a rank that
    failed. `options` is the HaltOnNaN callback, whose arguments configure the checks.

    Attributes:
        guard: Checks each training step; set once training has begun.
        is_training: Whether training has begun, and no NaN or Inf has ended it.
    """

    def __init__(self, trainer: Trainer, options: HaltOnNaN) -> None:
        self._trainer, self._options = trainer, options
        self._ranks = RankGather(timedelta(seconds=RERUN_TIMEOUT_S))
        self._directory = report_directory(trainer, options.reports_to)
        self._undo: list[Callable[[], None]] = []
        self.guard: StepGuard
        self.is_training = False
        self._scaler = gradient_scaler(trainer)

    def start_training(
        self,
        module: LightningModule,
        watch: ReadingWatch | None,
        before_update: Callable[[Any], None],
        before_saving: Callable[[], None],
    ) -> None:
        """Start checking. Call `watch` with each finite step, the other functions before updates and checkpoints."""
        trainer, options = self._trainer, self._options
        guard = self.guard = StepGuard(
            module,
            max_skips=options.max_skips,
            amp_patience=options.amp_patience,
            records=options.explain or options.save_step,
            gradients=gradients_under(type(trainer.strategy), world_size=trainer.world_size),
            ranks=self._ranks,
            mark_loop=LoopMarker(trainer).mark,
            watch=watch,
        )
        self._module, self._is_automatic, self.is_training = module, module.automatic_optimization, True
        # Where training_step takes its batches from the loader itself, hooks do not see them.
        self._sees_batches = "dataloader_iter" not in inspect.signature(module.training_step).parameters
        self._bad_at_start = frozenset(each.name for each in self._bad_now())
        self._n_logged = 0
        self._undo = [
            guard.close,
            watch_updates(trainer, before_update),
            guard_saving(trainer, before_saving),
        ]

    def close(self) -> None:
        """Undo all changes to the run, and disconnect from the other ranks. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._ranks.close()

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Keep a batch for a diagnosis. If it is the first of an optimizer step, also copy the module's buffers."""
        # Lightning's own rule for when gradients are zeroed. In manual optimization the module decides, and a step
        # begins where the last one ended.
        first = self._is_automatic and batch_idx % self._trainer.accumulate_grad_batches == 0
        number = training_step(self._trainer)
        self.guard.begin(batch if self._sees_batches else None, batch_idx, number, first=first)

    def note_loss(self, loss: Tensor) -> None:
        """Record a loss whose backward pass is about to begin."""
        divided_by = self._trainer.accumulate_grad_batches if self._is_automatic else 1
        self.guard.loss(loss, divided_by=divided_by, scaler=self._scaler)

    def check(self, optimizer: Optimizer) -> None:
        """Check the step before its optimizer update, and raise if it is bad."""
        self.conclude(self.guard.check(optimizer, scaler=self._scaler, reopen=not self._is_automatic))

    def conclude(self, bad: GuardedStep | None) -> None:
        """Log how many steps were skipped. If `bad` is not None, diagnose that step and raise NonFiniteError."""
        if len(self.guard.skipped) > self._n_logged:
            self._n_logged = len(self.guard.skipped)
            log_scalars(self._trainer, {"nonfinite/skipped": float(self._n_logged)}, self.guard.skipped[-1][0])
        if bad is not None:
            self.is_training = False
            raise self._reported(self._halt(bad).error())

    def read_rest(self) -> None:
        """Read the check results that are still on the device, and raise if a step was bad."""
        if self.is_training:
            self.conclude(self.guard.drain())

    def end_evaluation(self, module: LightningModule, stage: HaltStage) -> None:
        """Raise if a loss that an evaluation run has logged is NaN or Inf. Collective.

        Other metrics may legitimately be NaN or Inf. So may the losses of the sanity check, which runs before training.
        """
        if self._trainer.sanity_checking:
            return
        logged = {name: float(value) for name, value in values_logged_in_evaluation(self._trainer).items()}
        bad = {name: value for name, value in logged.items() if likely_losses([name]) and not math.isfinite(value)}
        everyone = self._ranks.objects(bad)
        if any(everyone):
            step = training_step(self._trainer)
            raise self._reported(evaluation_error(everyone, stage=stage, step=step, weights=bad_state(module)))

    def check_before_saving(self) -> None:
        """Raise if a checkpoint that is about to be written would hold NaN or Inf. Collective.

        Checking steps is not enough: an update by finite gradients can overflow, and forward can write NaN to buffers.
        """
        if not self.is_training:  # what is saved beside an error is the state before the bad step
            return
        self.read_rest()
        everyone = self._ranks.objects([bad for bad in self._bad_now() if bad.name not in self._bad_at_start])
        if not any(everyone):
            return
        forbid_saving_on_exception(self._trainer)
        self.is_training = False
        suspects = suspects_of_update(self._module, self._trainer.optimizers, next(filter(None, everyone)))
        step, past = training_step(self._trainer), self.guard.history
        raise self._reported(state_error(everyone, step=step, suspects=suspects, history=past))

    def leave_clean_state(self) -> None:
        """Undo the latest step if it was bad. Called after other errors, as a checkpoint may be written afterwards."""
        if not self.is_training:
            return
        try:
            bad = self.guard.drain()
            if bad is not None:
                self.guard.undo(bad)
                warnings.warn(f"Step {bad.number} was NaN or Inf too; it was undone.", FindingWarning, stacklevel=2)
            if saves_on_exception(self._trainer) and self._bad_now():
                forbid_saving_on_exception(self._trainer)
        except RuntimeError as error:  # the device itself may be what failed
            warnings.warn(f"The last steps could not be checked any more: {error}", DegradedWarning, stacklevel=2)

    def warn_if_blind(self) -> None:
        """Warn if no gradient could be checked: a module or hooks may update weights past Lightning."""
        history, parameters = self.guard.history, self._module.parameters()
        saw_none = not any(past.norm for past in history) and all(each.grad is None for each in parameters)
        if self._trainer.optimizers and (saw_none if history else not self._is_automatic):
            text = "use self.optimizers() and self.manual_backward(loss), and no hooks that update weights in backward"
            warnings.warn(f"HaltOnNaN saw no gradient, and checks none: {text}.", DegradedWarning, stacklevel=2)

    def _halt(self, step: GuardedStep) -> BadStep:
        """Undo a bad step, diagnose it, write it and a checkpoint to files, and return the diagnosis. Collective.

        If the diagnosis fails on a rank, all ranks still return, with an incomplete diagnosis.
        """
        mine = unless_it_fails(lambda: self._examined(step), lambda error: _unexamined(step, error))
        mine.rank = self._ranks.rank
        everyone = self._ranks.objects(mine)
        culprit = culprit_of(everyone)
        checkpoint = self._save_last_good(everyone)
        if self._options.explain or self._options.save_step:
            if culprit is None or culprit.rank == mine.rank:
                again = partial(self._run_again, mine, step, checkpoint, is_known=culprit is not None)
                unless_it_fails(again, lambda error: _not_found(mine, error))
            everyone = self._ranks.objects(mine)
            culprit = culprit_of(everyone)
        told, skipped = culprit or everyone[0], tuple(self.guard.skipped)
        return replace(told, is_culprit=culprit is not None, skipped=skipped, checkpoint=checkpoint)

    def _examined(self, step: GuardedStep) -> BadStep:
        unrestored = self.guard.undo(step)
        untoggle_all(self._module)
        bad = examine(self._module, step, self._trainer.optimizers, self.guard.history, self._bad_at_start)
        bad.unrestored = unrestored
        return bad

    def _run_again(self, bad: BadStep, step: GuardedStep, checkpoint: Path | str, *, is_known: bool) -> None:
        """Run a step again to explain `bad`. Save the step if it is bad again or `is_known` to be the cause."""
        if self.guard.is_sharded or any(micro.batch is None for micro in step.micro):
            why = "no rank has all weights" if self.guard.is_sharded else "hooks do not see its batch"
            bad.why_no_operation = bad.step_file = f"not sought: {why}, so that the step cannot be run again"
            return
        rerun = StepRerun(
            self._module,
            step.micro,
            StepConditions.now(self._trainer),
            optimizers=self._trainer.optimizers,
            parameters=step.parameters,
            trainer=self._trainer,
        )
        digests = run_again(bad, rerun, explains=self._options.explain)
        if not self._options.save_step or not (is_known or bad.is_bad_alone):
            return
        if isinstance(checkpoint, str):
            bad.step_file = "not written: there is no checkpoint that it could begin with"
            return
        names = names_of(self._module, step.parameters)
        saved = step_as_plain(bad, rerun, parameters=names, digests=digests, checkpoint=checkpoint.name)
        name = f"nonfinite-step{bad.step}-rank{bad.rank}.pt"
        written = write_file(self._directory, name, lambda path: torch.save(saved, path))
        bad.step_file = written.reason if isinstance(written, NotWritten) else written

    def _save_last_good(self, everyone: list[BadStep]) -> Path | str:
        """Write a checkpoint of the state before a bad step; return its path, or why there is none. Collective."""
        bad = [tensor for each in everyone for tensor in each.before]
        if bad:
            forbid_saving_on_exception(self._trainer)
            return f"not written: weights or buffers were bad before this step: {bad[0]}"
        if not self._options.save_last_good:
            return "not asked for (save_last_good=False)"
        if isinstance(self._directory, NotWritten):
            return self._directory.reason
        path = self._directory / f"nonfinite-step{everyone[0].step}-last-good.ckpt"

        def save() -> str:
            if self._ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._trainer, path)
            return ""

        failure = self._ranks.objects(unless_it_fails(save, lambda error: f"could not be written: {error}"))[0]
        return failure or path

    def _bad_now(self) -> list[BadTensor]:
        states = bad_optimizer_state(self._module, self._trainer.optimizers)
        # NaN in an optimizer's state is not made by an update of finite gradients, and makes weights NaN.
        causes, others = [each for each in states if each.n_nan], [each for each in states if not each.n_nan]
        return [*causes, *bad_state(self._module), *others]

    def _reported(self, error: NonFiniteError) -> NonFiniteError:
        """Write the report of an error and log it, and return the error with the report's path added. Collective."""
        name, report = f"nonfinite-step{error.step}-report.md", as_report(error)
        written = write_report_on_rank_zero(self._directory, name, report, self._ranks)
        log_text(self._trainer, "memtools/nonfinite_report", report, error.step)
        error.path, note = (
            (None, written.reason) if isinstance(written, NotWritten) else (written, short_path(str(written)))
        )
        *lines, advice = str(error).splitlines()
        error.args = ("\n".join([*lines, f"Report: {note}", advice]),)
        return error


def _unexamined(step: GuardedStep, error: str) -> BadStep:
    bad = BadStep.read_from(step)
    infer(bad)
    bad.because = f"the step could not be examined ({error})."
    return bad


def _not_found(bad: BadStep, error: str) -> None:
    """Record in `bad` that, because of an error, the bad operation is unknown or the step was not written to a file."""
    bad.why_no_operation = bad.why_no_operation or ("" if bad.what else f"not found: {error}")
    bad.step_file = f"could not be written: {error}"
