"""HaltOnNaN: no NaN and no Inf reaches the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._lightning import (
    LoopMark,
    forbid_saving_on_exception,
    gradient_scaler,
    guard_saving,
    mark_loops,
    saves_on_exception,
    training_step,
    turn_back,
    values_logged_in_evaluation,
)
from lightning_memtools.callbacks._halt_files import NO_FILES, save_on_rank_zero, write_on_rank_zero
from lightning_memtools.callbacks._rerun import Account, Aftermath, culprit_of
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.nonfinite.bad_step import Evidence, Trip
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state, bad_state, diagnose, examine
from lightning_memtools.nonfinite.evaluation_outputs import BadOutput, OutputWatch, bad_metrics
from lightning_memtools.nonfinite.halt_report import Halt, Kept, evaluation_message, overflow_message
from lightning_memtools.nonfinite.micro_batches import StartKeeper, move_to_host
from lightning_memtools.nonfinite.nonfinite_error import HaltStage, NonFiniteError
from lightning_memtools.nonfinite.ranks import PATIENCE, Ranks
from lightning_memtools.nonfinite.step_guard import Guard
from lightning_memtools.nonfinite.strategies import gradients_under
from lightning_memtools.reporting.files import report_directory
from lightning_memtools.reporting.loggers import log_scalars, log_text

# Of what parameters, gradients and an Adam optimizer take together (4 times the parameters), the share that older
# batches of an accumulation may hold: half of the 0.5% that all callbacks together may add to the peak.
BATCH_SHARE = 0.0025


class HaltOnNaN(Callback):
    """Stops training at the step where the loss or a gradient becomes NaN or Inf, before it does harm, and says why.

    Every optimizer step is checked between backward and update, on all gradients (before clipping) and the loss of
    every micro-batch. At a bad step all ranks raise `NonFiniteError` with a diagnosis; weights, optimizer state and
    buffers are bit for bit those from before the step, and no checkpoint holds NaN or Inf. The report goes to
    `<log_dir>/memtools/` and to loggers that take text (`memtools/nonfinite_report`).

    Cost, with fused SGD, Adam, AdamW or Adagrad (`fused=True`) without a gradient scaler: nothing waits for the device.
    A flag on the device holds back the bad step and all that follow; the host reads it one step late, and before each
    checkpoint, evaluation run and end of epoch. With all other optimizers, with 16-mixed and with FSDP: one read of a
    few hundred bytes in each step, for which the host waits. Either way one pass over the gradients, and a copy of the
    buffers. FSDP and ModelParallelStrategy add one all-reduce of two numbers to each step, an evaluation run under
    several ranks one gather.

    With 16-mixed, steps that the gradient scaler skips are normal; `amp_patience` of them in a row are not, nor is a
    skip at a scale below 1. A loss that is NaN or Inf itself is never normal.

    What moves although the step is held back is named in the report: data loaders, and what hooks and other callbacks
    do. An optimizer that evaluates the loss several times in a step (LBFGS) has moved the weights within it.

    Args:
        max_skips: How many bad steps are left out (logged as `nonfinite/skipped`) before one ends the run. A step that
            is left out still counts as a step for schedulers.
        amp_patience: With 16-mixed: how many skips in a row make a step bad.
        check_outputs: After each validation or test run, also raise if a single number that the step returned or
            logged is NaN or Inf, or a larger output holds NaN. Read once per run.
        save_last_good: Before raising, write a checkpoint of the state before the bad step.
        explain: Before raising, run the bad step again, with logging off and everything put back after it, to name the
            operation that made the first bad value, its module and line, and to try out what causes it. Runs the step
            some three to ten times, and takes the host's memory for a copy of the module and its optimizers.
        capsule: Before raising, keep the step as a file: batch, weights, buffers, random numbers. `replay` and
            `memtools replay` run it again, bit for bit.
        max_bytes: The largest that file may be, as "2GiB". What does not fit is left out, and named.
        directory: Where the report and that checkpoint go, instead of `<log_dir>/memtools/`.

    Raises:
        ValueError: `max_skips` is negative, `amp_patience` is below 1, or `max_bytes` is no size; at setup, if the
            strategy hides the gradients.
        NonFiniteError: From the hooks, when a step or an evaluation run is bad.
    """

    takes_part_in_trials = False
    """BatchSizeTuner's trials leave this callback out."""

    def __init__(
        self,
        *,
        max_skips: int = 0,
        amp_patience: int = 10,
        check_outputs: bool = True,
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
        self.max_skips = max_skips
        self.amp_patience = amp_patience
        self.check_outputs = check_outputs
        self.save_last_good = save_last_good
        self.explain = explain
        self.capsule = capsule
        self.max_bytes = max_bytes
        self._max_bytes = parse_size(max_bytes)
        self.directory = directory
        self._files: Path | None = None
        self._ranks: Ranks | None = None
        self._patient: Ranks | None = None
        self._guard: Guard | None = None
        self._watch: OutputWatch | None = None
        self._bad_at_start: frozenset[str] = frozenset()
        self._unguard_saving: Callable[[], None] = _nothing
        self._n_logged = 0
        self._said_blind = False

    @property
    def state_key(self) -> str:
        """Two of them with different arguments have different keys."""
        return self._generate_state_key(
            max_skips=self.max_skips,
            amp_patience=self.amp_patience,
            check_outputs=self.check_outputs,
            save_last_good=self.save_last_good,
            explain=self.explain,
            capsule=self.capsule,
            max_bytes=self.max_bytes,
            directory=self.directory,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that hide the gradients; find the other ranks and the place for reports."""
        self._stop()
        if stage == "fit":
            gradients_under(type(trainer.strategy), world_size=trainer.world_size)
        self._ranks = Ranks()
        self._patient = Ranks(PATIENCE) if self.explain or self.capsule else None
        files = report_directory(trainer, self.directory)
        self._files = files if isinstance(files, Path) else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to guard steps and checkpoints."""
        parameter_bytes = sum(p.numel() * p.element_size() for p in pl_module.parameters())
        self._guard = Guard(
            pl_module,
            max_skips=self.max_skips,
            amp_patience=self.amp_patience,
            gradients=gradients_under(type(trainer.strategy), world_size=trainer.world_size),
            ranks=self._ranks,
            mark=lambda: mark_loops(trainer),
            **self._for_a_replay(pl_module),
            budget_bytes=int(4 * parameter_bytes * BATCH_SHARE),
        )
        self._n_logged = 0
        bad = [*bad_state(pl_module), *bad_optimizer_state(pl_module, trainer.optimizers)]
        self._bad_at_start = frozenset(each.name for each in bad)
        self._unguard_saving = guard_saving(trainer, lambda: self._check_before_saving(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the batch, and keep the buffers if it begins a step."""
        # Lightning's own rule for when gradients are zeroed. In manual optimization the module decides, and a step
        # begins where the last one ended.
        first = pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0
        self._running().begin(batch, batch_idx, training_step(trainer), first=first)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the loss."""
        divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._running().loss(loss, divided_by=divided_by, scaler=gradient_scaler(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the step."""
        trip = self._running().check(
            optimizer, scaler=gradient_scaler(trainer), reopen=not pl_module.automatic_optimization
        )
        self._follow(trainer, pl_module, trip)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Let the batch go."""
        self._running().end_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is still out, before checkpoints of the epoch."""
        self._drain(trainer, pl_module)
        self._say_if_blind(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is still out."""
        self._drain(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is still out, and begin to watch outputs."""
        self._drain(trainer, pl_module)
        self._watch = OutputWatch() if self.check_outputs else None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Look at the outputs."""
        if self._watch is not None:
            self._watch.look(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge outputs and metrics."""
        self._end_evaluation(trainer, pl_module, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch outputs."""
        self._watch = OutputWatch() if self.check_outputs else None

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Look at the outputs."""
        if self._watch is not None:
            self._watch.look(outputs)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge outputs and metrics."""
        self._end_evaluation(trainer, pl_module, "test")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a clean state to whoever saves now, and undo what was switched on."""
        if self._guard is not None and not isinstance(exception, NonFiniteError):
            self._clean_up_after(trainer, pl_module, self._guard)
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what was switched on."""
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        """What a run left here cannot be pickled, and no other run needs it."""
        fresh = type(self)(
            max_skips=self.max_skips,
            amp_patience=self.amp_patience,
            check_outputs=self.check_outputs,
            save_last_good=self.save_last_good,
            explain=self.explain,
            capsule=self.capsule,
            max_bytes=self.max_bytes,
            directory=self.directory,
        )
        return vars(fresh)

    def _running(self) -> Guard:
        if self._guard is None:
            raise RuntimeError("HaltOnNaN's hooks were called without its on_train_start hook.")
        return self._guard

    def _drain(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._guard is not None:
            self._follow(trainer, pl_module, self._guard.drain())

    def _follow(self, trainer: Trainer, pl_module: LightningModule, trip: Trip | None) -> None:
        skipped = self._running().skipped
        if len(skipped) > self._n_logged:
            self._n_logged = len(skipped)
            log_scalars(trainer, {"nonfinite/skipped": float(len(skipped))}, skipped[-1][0])
        if trip is not None:
            raise self._halt(trainer, pl_module, trip)

    def _halt(self, trainer: Trainer, pl_module: LightningModule, trip: Trip) -> NonFiniteError:
        guard, ranks = self._running(), self._talk()
        unkept = guard.undo(trip)
        assert isinstance(trip.step.mark, LoopMark)
        turn_back(trainer, trip.step.mark)
        self._unguard_saving()
        evidence = examine(pl_module, trip, rank=ranks.rank, unkept=unkept, carried=guard.carries_losses)
        findings = ranks.gather((evidence, tuple(guard.history)))
        everyone = [theirs for theirs, _ in findings]
        histories = {theirs.rank: history for theirs, history in findings}
        diagnosis = diagnose(everyone, histories)
        halt = Halt(
            everyone=everyone,
            diagnosis=diagnosis,
            history=histories[everyone[0].rank if diagnosis.rank is None else diagnosis.rank],
            skipped=guard.skipped,
            n_missing=ranks.world_size - len(everyone),
        )
        self._run_again(trainer, pl_module, trip, evidence, halt)
        if any(theirs.parameters for theirs in everyone):
            halt.checkpoint_note = "not written: weights or buffers were bad before this step"
            forbid_saving_on_exception(trainer)
        else:
            halt.checkpoint_path, halt.checkpoint_note = self._last_good(trainer, evidence.step)
        halt.report_path, halt.report_note = write_on_rank_zero(
            self._files, f"nonfinite-step{evidence.step}-report.md", halt.markdown(), ranks
        )
        log_text(trainer, "memtools/nonfinite_report", halt.markdown(), evidence.step)
        if trainer.is_global_zero:
            Console().print(halt.console(), soft_wrap=True, markup=False, highlight=False)
        return halt.error()

    def _run_again(
        self, trainer: Trainer, pl_module: LightningModule, trip: Trip, evidence: Evidence, halt: Halt
    ) -> None:
        """Find the operation and write the capsule, on the rank that met the bad value."""
        guard, patient = self._running(), self._patient
        if patient is None:
            return
        if guard.is_sharded:
            halt.explanation_note = "not sought: no rank has all weights to run the step again alone"
            halt.capsule = Kept(note=halt.explanation_note)
            return
        aftermath, mine = None, Account(evidence.rank, None)
        if halt.diagnosis.rank in {None, evidence.rank}:
            try:
                aftermath = Aftermath(trainer, pl_module, trip, evidence, tuple(guard.history))
                mine = aftermath.account(explains=self.explain)
            except Exception as error:  # noqa: BLE001, whatever fails here must not hide the halt, nor keep ranks waiting
                mine = Account(evidence.rank, None, f"not found: {type(error).__name__}: {error}")
        theirs = culprit_of(patient.gather(mine), halt.diagnosis.rank)
        halt.tell(theirs.rank, theirs.explanation, theirs.note)
        halt.again = theirs.again
        if not self.capsule:
            return
        kept = Kept(note=NO_FILES)
        if self._files is not None and aftermath is not None and theirs.rank == evidence.rank:
            name = f"nonfinite-step{evidence.step}-rank{evidence.rank}-capsule.pt"
            kept = aftermath.write(self._files / name, self._max_bytes, halt.about())
        halt.capsule = dict(patient.gather((evidence.rank, kept))).get(theirs.rank, kept)

    def _for_a_replay(self, pl_module: LightningModule) -> dict[str, Any]:
        if not self.explain and not self.capsule:
            return {}
        return {"start": StartKeeper(pl_module).note, "move": move_to_host}

    def _last_good(self, trainer: Trainer, step: int) -> tuple[Path | None, str]:
        if not self.save_last_good:
            return None, "not asked for (save_last_good=False)"
        return save_on_rank_zero(trainer, self._files, f"nonfinite-step{step}-last-good.ckpt", self._talk())

    def _check_before_saving(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before a checkpoint: nothing may be out, and the update itself may have overflowed."""
        self._drain(trainer, pl_module)
        bad = [*bad_state(pl_module), *bad_optimizer_state(pl_module, trainer.optimizers)]
        bad = [each for each in bad if each.name not in self._bad_at_start]
        ranks, guard = self._talk(), self._running()
        everyone = ranks.gather(tuple(bad))
        if not any(everyone):
            return
        rank, bad = next((rank, list(theirs)) for rank, theirs in enumerate(everyone) if theirs)
        forbid_saving_on_exception(trainer)
        self._unguard_saving()
        step = guard.history[-1].step if guard.history else training_step(trainer)
        rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups if "lr" in group]
        message = overflow_message(bad, step=step, rank=rank, history=guard.history, learning_rates=rates)
        raise self._report(
            trainer, message, step=step, rank=rank, stage="train", cause="exploding gradient", parameters=bad
        )

    def _end_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: HaltStage) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        outputs = watch.bad_outputs()
        metrics = bad_metrics(values_logged_in_evaluation(trainer))
        ranks = self._talk()
        everyone: list[tuple[BadOutput, ...]] = ranks.gather((*outputs, *metrics))
        if not any(everyone):
            return
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs)
        weights = bad_state(pl_module)
        step = training_step(trainer)
        message = evaluation_message(everyone, stage=stage, step=step, weights=weights)
        batch_idx = next((bad.batch for bad in everyone[rank] if bad.batch is not None), None)
        raise self._report(trainer, message, step=step, rank=rank, stage=stage, batch_idx=batch_idx, parameters=weights)

    def _report(self, trainer: Trainer, message: str, *, step: int, stage: HaltStage, **fields: Any) -> NonFiniteError:
        path, note = write_on_rank_zero(self._files, f"nonfinite-{stage}-step{step}-report.md", message, self._talk())
        log_text(trainer, "memtools/nonfinite_report", message, step)
        message = f"{message}\nReport: {path or note}"
        history = self._guard.history if self._guard is not None else None
        losses, norms = (history.losses(), history.norms()) if history is not None else ((), ())
        return NonFiniteError(message, step=step, stage=stage, path=path, losses=losses, norms=norms, **fields)

    def _say_if_blind(self, pl_module: LightningModule) -> None:
        guard = self._running()
        if guard.saw_gradients or self._said_blind or not any(p.requires_grad for p in pl_module.parameters()):
            return
        if not pl_module.automatic_optimization:
            advice = "step the optimizers that self.optimizers() returns, and use self.manual_backward(loss)"
        elif guard.saw_losses:
            advice = "see whether the strategy or an optimizer keeps gradients elsewhere than in p.grad"
        else:
            return  # training_step gave no loss, so there was nothing to see
        self._said_blind = True
        warnings.warn(f"HaltOnNaN saw no gradient in this epoch, so it checks none: {advice}.", stacklevel=2)

    def _clean_up_after(self, trainer: Trainer, pl_module: LightningModule, guard: Guard) -> None:
        """Another error ended the run: leave a state that a checkpoint may hold, without the other ranks."""
        try:
            trip = guard.drain()
            if trip is not None:
                guard.undo(trip)
                assert isinstance(trip.step.mark, LoopMark)
                turn_back(trainer, trip.step.mark)
                warnings.warn(f"Step {trip.step.number} was NaN or Inf too; it was undone.", stacklevel=2)
            if saves_on_exception(trainer) and (
                bad_state(pl_module) or bad_optimizer_state(pl_module, trainer.optimizers)
            ):
                forbid_saving_on_exception(trainer)
        except RuntimeError as error:  # the device itself may be what failed
            warnings.warn(f"The last steps could not be checked any more: {error}", stacklevel=2)

    def _talk(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError("HaltOnNaN's hooks were called without its setup hook.")
        return self._ranks

    def _stop(self) -> None:
        self._unguard_saving()
        self._unguard_saving = _nothing
        if self._guard is not None:
            self._guard.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._patient is not None:
            self._patient.close()
        self._guard = self._ranks = self._patient = self._watch = self._files = None
        self._bad_at_start = frozenset()
        self._n_logged = 0
        self._said_blind = False


def _nothing() -> None:
    """Nothing to undo."""
