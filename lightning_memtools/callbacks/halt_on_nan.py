"""HaltOnNaN: no NaN and no Inf reaches the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memtools._lightning import (
    changes_gradients,
    gradient_scaler,
    guard_saving,
    mark_loops,
    training_step,
    turn_back,
    values_logged_in_evaluation,
    watch_updates,
)
from lightning_memtools.callbacks.halt_files import HaltFiles, training_run
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.nonfinite.bad_step import BadStep
from lightning_memtools.nonfinite.diagnosis import bad_state
from lightning_memtools.nonfinite.evaluation_outputs import OutputWatch, bad_metrics, is_loss
from lightning_memtools.nonfinite.halt_report import NonFiniteFinding, evaluation_finding
from lightning_memtools.nonfinite.halt_session import HaltOptions, HaltSession
from lightning_memtools.nonfinite.micro_batches import BatchStartRecorder, move_to_host
from lightning_memtools.nonfinite.nonfinite_error import HaltStage, NonFiniteError
from lightning_memtools.nonfinite.step_guard import StepGuard, gradients_under
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.loggers import log_scalars, log_text

# Of what parameters, gradients and an Adam optimizer take together (4 times the parameters), the share that older
# batches of an accumulation may hold: half of the 0.5% that all callbacks together may add to the peak.
BATCH_SHARE = 0.0025


class HaltOnNaN(Callback):
    """Stops training at the step where the loss or a gradient becomes NaN or Inf, before it does harm, and says why.

    Every optimizer step is checked between backward and update, on all gradients (before clipping) and the loss of
    every micro-batch. At a bad step all ranks raise `NonFiniteError` with a diagnosis; weights, optimizer state and
    buffers are bit for bit those from before the step, and no checkpoint holds NaN or Inf.

    | logged | when |
    | --- | --- |
    | `nonfinite/skipped` | the number of skipped steps, at each skipped step (`max_skips`) |
    | `memtools/nonfinite_report` | the report, at the end of a bad run, to loggers that take text |

    The report also goes to `<log_dir>/memtools/`, with the last good checkpoint and the step as a file.

    Cost, with fused SGD, Adam, AdamW or Adagrad (`fused=True`) without a gradient scaler: nothing waits for the device.
    A flag on the device holds back the bad step and all that follow; the host reads it one step late, and before each
    checkpoint, evaluation run and end of epoch. With all other optimizers, with 16-mixed and with FSDP: one read of a
    few hundred bytes in each step, for which the host waits. Either way one pass over the gradients, and a copy of the
    buffers. FSDP and ModelParallelStrategy add one all-reduce of two numbers to each step, an evaluation run under
    several ranks one gather.

    Gradients are checked a second time, after clipping and all hooks, where the module defines
    `configure_gradient_clipping` or `on_before_optimizer_step`, or another callback the latter; the host then waits for
    it. A learning rate or other setting that is NaN is found always.

    With 16-mixed, steps that the gradient scaler skips are normal; `amp_patience` of them in a row are not, nor is a
    skip at a scale below 1. A loss that is NaN or Inf itself is never normal.

    The report names what changed although the step was held back: data loaders, and the effects of hooks and other
    callbacks. An optimizer that evaluates the loss several times in a step (LBFGS) has moved the weights within it.

    Args:
        max_skips: The number of bad steps that are skipped (logged as `nonfinite/skipped`) before one ends the run. A
            skipped step still counts as a step for schedulers.
        amp_patience: With 16-mixed: the number of skips in a row that make a step bad. A scaler that starts at 65536
            takes at most 16 to come down to 1.
        check_outputs: What of a validation or test run must be finite; read once per run, and never in the sanity
            check. "losses": a single number that the step returns, and returned or logged numbers whose names contain
            "loss"; other metrics that are NaN or Inf (a class that is absent, a best value before the first) are
            named in a report, and training goes on. True: also every other single number that the step returns or
            logs, and larger outputs must hold no NaN. False: nothing.
        save_last_good: Before raising, write a checkpoint of the state before the bad step.
        explain: Before raising, run the bad step again, with logging off and everything restored afterwards, to name
            the operation that made the first bad value, its module and line, and to test what causes it. This runs the
            step some three to ten times, and takes host memory for a copy of the module and its optimizers.
        capsule: Before raising, save the step to a file: batch, weights, buffers, random numbers. `replay` and
            `memtools replay` run it again, bit for bit.
        max_bytes: The largest size of that file, such as "2GiB". What does not fit is left out, and named.
        directory: Where the report and those files go, instead of `<log_dir>/memtools/`. Without a logger, nothing is
            written unless this is set.

    Raises:
        ValueError: `max_skips` is negative, `amp_patience` is below 1, `check_outputs` is none of its values, or
            `max_bytes` is no size; at setup, if the strategy hides the gradients.
        NonFiniteError: From the hooks, when a step or an evaluation run is bad.
    """

    takes_part_in_trials = False
    """BatchSizeTuner's trials leave this callback out."""

    def __init__(
        self,
        *,
        max_skips: int = 0,
        amp_patience: int = 20,
        check_outputs: bool | Literal["losses"] = "losses",
        save_last_good: bool = True,
        explain: bool = True,
        capsule: bool = True,
        max_bytes: str = "2GiB",
        directory: str | None = None,
    ) -> None:
        if max_skips < 0:
            raise ValueError(f"max_skips={max_skips} is not a number of steps. Use 0 to halt at the first bad step.")
        if amp_patience < 1:
            raise ValueError(f"amp_patience={amp_patience} is not a number of steps. Use 1 to halt at the first skip.")
        if check_outputs not in {True, False, "losses"}:
            raise ValueError(f'check_outputs={check_outputs!r} is none of True, False and "losses".')
        parse_size(max_bytes)
        self.max_skips = max_skips
        self.amp_patience = amp_patience
        self.check_outputs = check_outputs
        self.save_last_good = save_last_good
        self.explain = explain
        self.capsule = capsule
        self.max_bytes = max_bytes
        self.directory = directory
        self._files: HaltFiles | None = None
        self._session: HaltSession | None = None
        self._watch: OutputWatch | None = None
        self._unguard_saving: Callable[[], None] = _do_nothing
        self._unwatch_updates: Callable[[], None] = _do_nothing
        self._n_logged = 0
        self._metrics: dict[str, str] = {}

    @property
    def state_key(self) -> str:
        """Two instances with different arguments have different keys."""
        return f"{type(self).__qualname__}{self._arguments()!r}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that hide the gradients; connect to the other ranks and find the directory for reports."""
        self._stop()
        if stage == "fit":
            gradients_under(type(trainer.strategy), world_size=trainer.world_size)
        self._files = HaltFiles(trainer, self.directory, reruns=self.explain or self.capsule)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to guard steps and checkpoints."""
        files = self._opened()
        reruns: dict[str, Any] = {}
        if self.explain or self.capsule:
            reruns = {"start": BatchStartRecorder(pl_module).record, "move": move_to_host}
        guard = StepGuard(
            pl_module,
            max_skips=self.max_skips,
            amp_patience=self.amp_patience,
            gradients=gradients_under(type(trainer.strategy), world_size=trainer.world_size),
            ranks=files.ranks,
            mark_loop=lambda: partial(turn_back, trainer, mark_loops(trainer)),
            budget_bytes=int(
                4 * BATCH_SHARE * sum(p.numel() * p.element_size() for p in pl_module.parameters() if not is_lazy(p))
            ),
            **reruns,
        )
        options = HaltOptions(
            explain=self.explain,
            capsule=self.capsule,
            max_bytes=parse_size(self.max_bytes),
            save_last_good=self.save_last_good,
        )
        self._session = HaltSession(
            training_run(trainer, pl_module), guard, files.ranks, files.patient_ranks, files.actions(), options
        )
        self._n_logged = 0
        self._unguard_saving = guard_saving(trainer, lambda: self._check_before_saving(trainer))
        self._unwatch_updates = watch_updates(trainer, partial(self._before_update, trainer))
        guard.checks_again = changes_gradients(trainer)
        guard.is_told_of_updates = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the batch, and copy the buffers if it begins a step."""
        # Lightning's own rule for when gradients are zeroed. In manual optimization the module decides, and a step
        # begins where the last one ended.
        first = pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0
        self._running().guard.begin(batch, batch_idx, training_step(trainer), first=first)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the loss."""
        divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._running().guard.loss(loss, divided_by=divided_by, scaler=gradient_scaler(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the step."""
        bad_step = self._running().guard.check(
            optimizer, scaler=gradient_scaler(trainer), reopen=not pl_module.automatic_optimization
        )
        self._conclude(trainer, bad_step)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Release the batch."""
        self._running().guard.end_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the results that are still on the device, before checkpoints of the epoch."""
        self._read_rest(trainer)
        self._running().warn_if_blind()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the results that are still on the device."""
        self._read_rest(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the results that are still on the device, and start to check outputs."""
        self._read_rest(trainer)
        self._start_to_watch(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Check the outputs on the device."""
        if self._watch is not None:
            self._watch.check(outputs, _place(trainer.num_val_batches, batch_idx, dataloader_idx))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if outputs or metrics were bad."""
        self._end_evaluation(trainer, pl_module, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to check outputs."""
        self._start_to_watch(trainer)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Check the outputs on the device."""
        if self._watch is not None:
            self._watch.check(outputs, _place(trainer.num_test_batches, batch_idx, dataloader_idx))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if outputs or metrics were bad."""
        self._end_evaluation(trainer, pl_module, "test")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a clean state for checkpoints that are written now, and undo what was switched on."""
        if self._session is not None and not isinstance(exception, NonFiniteError):
            self._session.leave_clean_state()
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what was switched on."""
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """Return a fresh instance's state: a run's own cannot be pickled, and no other run needs it."""
        return vars(type(self)(**self._arguments()))

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(HaltOnNaN).parameters}

    def _opened(self) -> HaltFiles:
        if self._files is None:
            raise RuntimeError("HaltOnNaN's hooks were called without its setup hook.")
        return self._files

    def _running(self) -> HaltSession:
        if self._session is None:
            raise RuntimeError("HaltOnNaN's hooks were called without its on_train_start hook.")
        return self._session

    def _read_rest(self, trainer: Trainer) -> None:
        if self._session is not None:
            self._conclude(trainer, self._session.guard.drain())

    def _conclude(self, trainer: Trainer, bad_step: BadStep | None) -> None:
        """Log the steps that were skipped, and raise if there is a bad step."""
        session = self._running()
        skipped = session.guard.skipped
        if len(skipped) > self._n_logged:
            self._n_logged = len(skipped)
            log_scalars(trainer, {"nonfinite/skipped": float(len(skipped))}, skipped[-1][0])
        if bad_step is None:
            return
        self._unguard_saving()
        report = session.halt(bad_step)
        log_text(trainer, "memtools/nonfinite_report", report.markdown(), bad_step.step.number)
        if trainer.is_global_zero:
            print_on_console(report.console(), soft_wrap=True)
        raise report.error()

    def _before_update(self, trainer: Trainer, optimizer: Optimizer) -> None:
        if self._session is not None:
            self._conclude(trainer, self._session.guard.before_update(optimizer))

    def _check_before_saving(self, trainer: Trainer) -> None:
        self._read_rest(trainer)
        finding = self._running().bad_update(training_step(trainer))
        if finding is not None:
            self._unguard_saving()
            raise self._error(trainer, finding)

    def _start_to_watch(self, trainer: Trainer) -> None:
        # The sanity check runs with untrained weights on a few batches, whose metrics mean nothing.
        is_on = bool(self.check_outputs) and not trainer.sanity_checking
        self._watch = OutputWatch(only_losses=self.check_outputs == "losses") if is_on else None

    def _note_metrics(self, trainer: Trainer, bad: dict[str, str]) -> None:
        """Name metrics that are NaN or Inf in a report, each the first time. Collective."""
        new = {name: text for name, text in bad.items() if name not in self._metrics}
        if not new:
            return
        self._metrics.update(new)
        if self._session is not None:
            self._session.metrics[:] = self._metrics.values()
        text = (
            f"Metrics that were not finite in evaluation, at first: {'; '.join(self._metrics.values())}.\nTraining "
            "goes on: a metric may rightly be NaN or Inf. Where it may not, use HaltOnNaN(check_outputs=True).\n"
        )
        self._opened().write_report("nonfinite-metrics-report.md", text)
        log_text(trainer, "memtools/nonfinite_report", text, training_step(trainer))

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: HaltStage) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        metrics = bad_metrics(values_logged_in_evaluation(trainer))
        mere = [] if self.check_outputs is True else [each for each in metrics if not is_loss(each.name)]
        bad = (*watch.bad_outputs(), *(each for each in metrics if each not in mere))
        step = training_step(trainer)
        gathered = self._opened().ranks.objects((bad, {each.name: f"{each} ({stage}, step {step})" for each in mere}))
        everyone = [theirs for theirs, _ in gathered]
        self._note_metrics(trainer, {name: text for _, theirs in gathered for name, text in theirs.items()})
        if any(everyone):
            weights = bad_state(pl_module)
            finding = evaluation_finding(everyone, stage=stage, step=training_step(trainer), weights=weights)
            raise self._error(trainer, finding)

    def _error(self, trainer: Trainer, finding: NonFiniteFinding) -> NonFiniteError:
        name = f"nonfinite-{finding.stage}-step{finding.step}-report.md"
        path, note = self._opened().write_report(name, finding.message)
        log_text(trainer, "memtools/nonfinite_report", finding.message, finding.step)
        return finding.error(path, note, () if self._session is None else self._session.guard.history)

    def _stop(self) -> None:
        self._unguard_saving()
        self._unwatch_updates()
        self._unguard_saving = self._unwatch_updates = _do_nothing
        if self._session is not None:
            self._session.guard.close()
        if self._files is not None:
            self._files.close()
        self._files = self._session = self._watch = None


def _place(n_batches: Any, batch_idx: int, loader: int) -> str:
    """Return the place of an evaluation batch as text, where there are several data loaders; else ""."""
    return f"batch {batch_idx} of data loader {loader}" if isinstance(n_batches, list) and len(n_batches) > 1 else ""


def _do_nothing() -> None:
    """Do nothing: nothing has been switched on."""
