"""Connects HaltOnNaN's guard to a Trainer, and ends its run at a bad step: undo, evidence, rerun, files and report."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import (
    LoopMarker,
    changes_gradients,
    forbid_saving_on_exception,
    gradient_scaler,
    guard_saving,
    saves_on_exception,
    training_step,
    values_logged_in_evaluation,
    watch_updates,
    wraps_updates,
    write_checkpoint,
)
from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.nonfinite.bad_step import BadStep, Evidence, StepConditions, plain_facts, precision_now
from lightning_memtools.nonfinite.bad_step_rerun import BadStepRerun
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state, bad_state, diagnose, examine
from lightning_memtools.nonfinite.evaluation_guard import EvaluationGuard
from lightning_memtools.nonfinite.finite_checks import BadTensor
from lightning_memtools.nonfinite.halt_report import (
    CapsuleNote,
    HaltReport,
    HaltStage,
    NonFiniteError,
    RankFindings,
    findings_to_report,
    overflow_error,
    state_error,
)
from lightning_memtools.nonfinite.step_guard import HaltOptions, ReadingWatch, StepGuard, gradients_under
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NotWritten, report_directory, write_report_on_rank_zero
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.ranks import RankGather

# One rank runs a step several times and reads every operation's outputs, while the others wait.
RERUN_TIMEOUT_S = 600


class HaltRun:
    """HaltOnNaN in one call of the Trainer.

    Of its files, rank 0 writes, every rank learns the path, and none waits for a rank that failed. Make it on every
    rank.

    Args:
        trainer: The Trainer.
        options: The arguments of HaltOnNaN.

    Attributes:
        evaluation: Checks its evaluation runs.
        guard: Guards the steps of its training; None as long as there is none.
        sees_batches: Whether hooks see a step's batches: not where training_step takes them from `dataloader_iter`.
    """

    def __init__(self, trainer: Trainer, options: HaltOptions) -> None:
        self._trainer, self._options = trainer, options
        self._ranks = RankGather()
        # What takes a rerun of the step to find out.
        self._patient_ranks = RankGather(timedelta(seconds=RERUN_TIMEOUT_S)) if options.reruns else self._ranks
        self._directory = report_directory(trainer, options.directory)
        self._undo: list[Callable[[], None]] = []
        self.evaluation = EvaluationGuard(options.check_outputs, self._ranks)
        self.guard: StepGuard | None = None
        self.sees_batches = True

    def start_training(self, module: LightningModule, watch: ReadingWatch | None = None) -> None:
        """Start to guard steps and checkpoints. `watch` sees what is read of finite steps."""
        trainer = self._trainer
        guard = self.guard = StepGuard(
            module,
            self._options,
            gradients=gradients_under(type(trainer.strategy), world_size=trainer.world_size),
            ranks=self._ranks,
            mark_loop=LoopMarker(trainer).mark,
            checks_again=changes_gradients(trainer),
            wraps_updates=wraps_updates(trainer),
            watch=watch,
        )
        self._module = module
        self.sees_batches = "dataloader_iter" not in inspect.signature(module.training_step).parameters
        self._bad_at_start = guard.bad_before = frozenset(each.name for each in self._bad_now())
        self._is_first_warning, self._n_logged = FirstTime(), 0
        self._finite_at = training_step(trainer)
        self._undo = [
            guard.close,
            watch_updates(trainer, lambda optimizer: self.conclude(guard.before_update(optimizer))),
            guard_saving(trainer, self._before_saving),
        ]

    def close(self) -> None:
        """Undo what was switched on, and disconnect from the other ranks. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._ranks.close()
        self._patient_ranks.close()

    def conclude(self, bad_step: BadStep | None) -> None:
        """Log the steps that were skipped, and raise if there is a bad step."""
        assert self.guard is not None
        if len(self.guard.skipped) > self._n_logged:
            self._n_logged = len(self.guard.skipped)
            log_scalars(self._trainer, {"nonfinite/skipped": float(self._n_logged)}, self.guard.skipped[-1][0])
        if bad_step is None:
            return
        self._release_checkpoints()
        report = self._halt(self.guard, bad_step)
        log_text(self._trainer, "memtools/nonfinite_report", report.markdown(), bad_step.step.number)
        if self._trainer.is_global_zero:
            print_on_console(report.console(), soft_wrap=True)
        raise report.error()

    def read_rest(self) -> None:
        """Read the results that are still on the device, and raise if one is bad."""
        if self.guard is not None:
            self.conclude(self.guard.drain())

    def end_evaluation(self, module: LightningModule, stage: HaltStage) -> None:
        """End an evaluation run: raise if a loss was bad, name other metrics in a report. Collective."""
        step = training_step(self._trainer)
        history = () if self.guard is None else self.guard.history
        metrics = values_logged_in_evaluation(self._trainer)
        error, text = self.evaluation.end(module, metrics, stage, step, history)
        if text:
            self._write_report("nonfinite-metrics-report.md", text)
            log_text(self._trainer, "memtools/nonfinite_report", text, step)
        if error is not None:
            raise self._reported(error)

    def _before_saving(self) -> None:
        """Raise if a checkpoint that is about to be written would hold NaN or Inf. Collective.

        An update can overflow although its gradients are finite, and buffers are written by forward.
        """
        self.read_rest()
        step = training_step(self._trainer)
        found = [
            [bad for bad in kind if bad.name not in self._bad_at_start]
            for kind in (bad_optimizer_state(self._module, self._trainer.optimizers), bad_state(self._module))
        ]
        everyone = self._ranks.objects(found)
        if not any(states or rest for states, rest in everyone):
            self._finite_at = step
            return
        assert self.guard is not None
        forbid_saving_on_exception(self._trainer)
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        names = {plain_name(name) for name, one in self._module.named_parameters() if id(one) in updated}
        # Finite gradients can make Inf of an optimizer's state, but no NaN.
        has_nan = any(bad.n_nan for states, _ in everyone for bad in states)
        if not has_nan and any(bad.name in names for _, rest in everyone for bad in rest):
            rates = [float(group["lr"]) for group in groups if "lr" in group]
            weights_first = [[*rest, *states] for states, rest in everyone]
            error = overflow_error(weights_first, step=step, history=self.guard.history, learning_rates=rates)
        else:
            error = state_error(
                [[*states, *rest] for states, rest in everyone],
                step=step,
                finite_at=self._finite_at,
                history=self.guard.history,
            )
        self._release_checkpoints()
        raise self._reported(error)

    def leave_clean_state(self) -> None:
        """Undo a bad step that was not read yet, after another error: a checkpoint may follow."""
        if self.guard is None:
            return
        try:
            bad_step = self.guard.drain()
            if bad_step is not None:
                self.guard.undo(bad_step)
                warnings.warn(f"Step {bad_step.step.number} was NaN or Inf too; it was undone.", stacklevel=2)
            if saves_on_exception(self._trainer) and self._bad_now():
                forbid_saving_on_exception(self._trainer)
        except RuntimeError as error:  # the device itself may be what failed
            warnings.warn(f"The last steps could not be checked any more: {error}", stacklevel=2)

    def warn_if_blind(self) -> None:
        """Warn, once, if no gradient was seen in an epoch although an optimizer has weights to train."""
        guard, module = self.guard, self._module
        assert guard is not None
        weights = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        if guard.saw_gradients or weights.isdisjoint(id(p) for g in groups for p in g["params"]):
            return  # also where no optimizer trains weights, as in PatchCore
        if not module.automatic_optimization:
            advice = "step the optimizers that self.optimizers() returns, and use self.manual_backward(loss)"
        elif guard.saw_losses:
            advice = "see whether the strategy or an optimizer keeps gradients elsewhere than in p.grad"
        else:
            return  # training_step returned no loss, or one that depends on no weight: there was nothing to see
        if self._is_first_warning():
            warnings.warn(f"HaltOnNaN saw no gradient in this epoch, so it checks none: {advice}.", stacklevel=2)

    def _halt(self, guard: StepGuard, bad_step: BadStep) -> HaltReport:
        """Undo the step, find its cause, and write the capsule, the last good checkpoint and the report."""
        module, ranks = self._module, self._ranks
        unrestored = guard.undo(bad_step)
        evidence = examine(module, bad_step, rank=ranks.rank, unrestored=unrestored, carried=guard.carries_losses)
        states = bad_optimizer_state(module, self._trainer.optimizers)
        gathered = ranks.objects(
            (evidence, tuple(guard.history), [one for one in states if one.name not in self._bad_at_start])
        )
        everyone = [theirs for theirs, _, _ in gathered]
        histories = {theirs.rank: history for theirs, history, _ in gathered}
        diagnosis = diagnose(everyone, histories)
        report = HaltReport(
            everyone=everyone,
            diagnosis=diagnosis,
            history=histories[everyone[0].rank if diagnosis.rank is None else diagnosis.rank],
            skipped=guard.skipped,
            n_missing=ranks.world_size - len(everyone),
            metrics=list(self.evaluation.metrics.values()),
        )
        self._run_again(guard, bad_step, evidence, report)
        bad_states = [state for _, _, theirs in gathered for state in theirs]
        if any(theirs.parameters for theirs in everyone):
            made = "made bad by this update" if evidence.is_lost else "bad before this step"
            report.checkpoint_note = f"not written: weights or buffers were {made}"
            forbid_saving_on_exception(self._trainer)
        elif bad_states:
            report.checkpoint_note = f"not written: {bad_states[0]} of the optimizer was not finite before this step"
            forbid_saving_on_exception(self._trainer)
        elif self._options.save_last_good:
            name = f"nonfinite-step{evidence.step}-last-good.ckpt"
            report.checkpoint_path, report.checkpoint_note = self._save_checkpoint(name)
        else:
            report.checkpoint_note = "not asked for (save_last_good=False)"
        name = f"nonfinite-step{evidence.step}-report.md"
        report.report_path, report.report_note = self._write_report(name, report.markdown())
        return report

    def _run_again(self, guard: StepGuard, bad_step: BadStep, evidence: Evidence, report: HaltReport) -> None:
        """Find the operation and write the capsule, on the rank that had the bad value. Collective."""
        options, rank, directory = self._options, evidence.rank, self._directory
        if not options.reruns:
            return
        if guard.is_sharded or bad_step.is_lost:
            reason = "no rank has all weights" if guard.is_sharded else "the weights before the update are lost"
            report.explanation_note = f"not sought: {reason} to run the step again"
            report.capsule = CapsuleNote(note=report.explanation_note)
            return
        rerun, mine = None, RankFindings(rank, None)
        if report.diagnosis.rank in {None, rank}:
            try:
                rerun = BadStepRerun(
                    self._module, self._trainer, step_conditions(self._trainer), bad_step, evidence,
                    tuple(guard.history), restored=guard.written_and_restored(),
                )  # fmt: skip
                mine = rerun.findings(
                    explains=options.explain and not bad_step.update,
                    keeps=options.capsule and isinstance(directory, Path),
                )
                if bad_step.update:
                    mine = replace(mine, note="not sought: forward and backward were finite")
            except Exception as error:  # noqa: BLE001, it must neither hide the halt nor leave the other ranks waiting
                mine = RankFindings(rank, None, f"not found: {type(error).__name__}: {error}")
        findings = findings_to_report(self._patient_ranks.objects(mine), report.diagnosis.rank)
        report.add_findings(findings)
        if not options.capsule:
            return
        note = CapsuleNote(note=directory.reason if isinstance(directory, NotWritten) else "")
        if isinstance(directory, Path) and rerun is not None and findings.rank == rank:
            path = directory / f"nonfinite-step{evidence.step}-rank{rank}-capsule.pt"
            note = rerun.write(path, parse_size(options.max_bytes), report.about())
        report.capsule = dict(self._patient_ranks.objects((rank, note))).get(findings.rank, note)

    def _bad_now(self) -> list[BadTensor]:
        return [*bad_state(self._module), *bad_optimizer_state(self._module, self._trainer.optimizers)]

    def _release_checkpoints(self) -> None:
        """End the check before each checkpoint."""
        if self._undo:
            self._undo[-1]()

    def _reported(self, error: NonFiniteError) -> NonFiniteError:
        """Write the report of an error, and return the error with the place of the report. Collective."""
        error.path, note = self._write_report(f"nonfinite-{error.stage}-step{error.step}-report.md", str(error))
        log_text(self._trainer, "memtools/nonfinite_report", str(error), error.step)
        error.args = (f"{error}\nReport: {short_path(str(error.path)) if error.path else note}",)
        return error

    def _write_report(self, name: str, text: str) -> tuple[Path | None, str]:
        written = write_report_on_rank_zero(self._directory, name, text, self._ranks)
        return (None, written.reason) if isinstance(written, NotWritten) else (written, "")

    def _save_checkpoint(self, name: str) -> tuple[Path | None, str]:
        if isinstance(self._directory, NotWritten):
            return None, self._directory.reason
        path, failure = self._directory / name, ""
        try:
            if self._ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._trainer, path)
        except Exception as error:  # noqa: BLE001, whatever keeps the checkpoint from being written must not hide the halt
            failure = f"could not be written: {type(error).__name__}: {error}"
        failure = self._ranks.objects(failure)[0]
        return (None, failure) if failure else (path, "")


def step_conditions(trainer: Trainer) -> StepConditions:
    """Return the conditions that a training step runs under."""
    module, scaler = trainer.lightning_module, gradient_scaler(trainer)
    with trainer.precision_plugin.train_step_context():
        precision = precision_now(module.device.type)
    return StepConditions(
        divided_by=trainer.accumulate_grad_batches if module.automatic_optimization else 1,
        scale=None if scaler is None else scaler.get_scale(),
        trainer=plain_facts(trainer),
        **precision,
    )
