"""Ends a run of `fit` at a bad step: undoes the step, asks all ranks what they know, and gathers the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch.optim import Optimizer

from lightning_memtools.memory.sizes import is_count, parse_size
from lightning_memtools.nonfinite.bad_step import BadStep, Evidence
from lightning_memtools.nonfinite.bad_step_rerun import BadStepRerun, RankFindings, TrainingRun, findings_to_report
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state, bad_state, diagnose, examine
from lightning_memtools.nonfinite.finite_checks import BadTensor
from lightning_memtools.nonfinite.halt_report import CapsuleNote, HaltReport, NonFiniteError, overflow_error
from lightning_memtools.nonfinite.step_guard import StepGuard
from lightning_memtools.nonfinite.unrestored_state import OutsideState
from lightning_memtools.reporting.ranks import RankGather

# One rank runs a step several times and reads every operation's outputs, while the others wait.
RERUN_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltActions:
    """The actions of a halt outside of the step: plain callables, which the callback makes from the Trainer.

    Attributes:
        saves_on_exception: Returns whether a checkpoint will be written when training fails.
        forbid_saving: Keeps that checkpoint from being written.
        save_checkpoint: Writes a checkpoint under this file name. Returns its path and "", or None and the reason. It
            is called on every rank.
        write_report: Writes a text under this file name; returns as `save_checkpoint` does. Called on every rank.
        step: Returns the training step.
        log_skipped: Logs the number of skipped steps, at the training step that is given second.
        publish: Offers a report in markdown to the loggers, prints a short form unless it is empty; the training step.
        release_checkpoints: Ends the check before each checkpoint.
        directory: Where files go; None where the run keeps none.
        no_directory: The reason for that.
    """

    saves_on_exception: Callable[[], bool]
    forbid_saving: Callable[[], None]
    save_checkpoint: Callable[[str], tuple[Path | None, str]]
    write_report: Callable[[str, str], tuple[Path | None, str]]
    step: Callable[[], int]
    log_skipped: Callable[[int, int], None]
    publish: Callable[[str, str, int], None]
    release_checkpoints: Callable[[], None]
    directory: Path | None
    no_directory: str = ""

    def report(self, error: NonFiniteError) -> NonFiniteError:
        """Write the report of an error, and return the error with the place of the report. Collective."""
        error.path, note = self.write_report(f"nonfinite-{error.stage}-step{error.step}-report.md", str(error))
        self.publish(str(error), "", error.step)
        error.args = (f"{error}\nReport: {error.path or note}",)
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltOptions:
    """The arguments of HaltOnNaN, which says what each means.

    Raises:
        ValueError: One of them is none of its values.
    """

    max_skips: int = 0
    amp_patience: int = 20
    check_outputs: bool | Literal["losses"] = "losses"
    save_last_good: bool = True
    explain: bool = True
    capsule: bool = True
    max_bytes: str = "2GiB"
    directory: str | None = None
    undo_updates: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.max_skips, least=0):
            raise ValueError(
                f"max_skips={self.max_skips!r} is not a number of steps. Use 0 to halt at the first bad step."
            )
        if not is_count(self.amp_patience):
            raise ValueError(
                f"amp_patience={self.amp_patience!r} is not a number of steps. Use 1 to halt at the first skip."
            )
        if self.check_outputs not in {True, False, "losses"}:
            raise ValueError(f'check_outputs={self.check_outputs!r} is none of True, False and "losses".')
        parse_size(self.max_bytes)

    @property
    def reruns(self) -> bool:
        """True if a bad step is run again, or kept to be run again."""
        return self.explain or self.capsule


class HaltSession:
    """Ends one run of `fit`, when its guard finds a bad step or its weights are bad before a checkpoint.

    Args:
        run: The training run.
        guard: The guard of its steps.
        ranks: Gathers from all ranks.
        patient_ranks: Gathers what takes a rerun of the step to find out.
        actions: What is done to files and checkpoints.
        options: What is done at a halt.
        metrics: The metrics of evaluation runs that were not finite: name to text, for the report. They may come later.
    """

    def __init__(  # noqa: PLR0917, one argument for each part of the run
        self,
        run: TrainingRun,
        guard: StepGuard,
        ranks: RankGather,
        patient_ranks: RankGather,
        actions: HaltActions,
        options: HaltOptions,
        metrics: Mapping[str, str],
    ) -> None:
        self.guard = guard
        self._run, self._actions, self._options = run, actions, options
        self._ranks, self._patient_ranks = ranks, patient_ranks
        self._bad_at_start = {each.name for each in self._bad_now()}
        guard.bad_before = frozenset(self._bad_at_start)
        self._outside = OutsideState(run.module) if options.explain else None
        self._has_warned = False
        self._n_logged = 0
        self._metrics = metrics

    def conclude(self, bad_step: BadStep | None) -> None:
        """Log the steps that were skipped, and raise if there is a bad step."""
        if len(self.guard.skipped) > self._n_logged:
            self._n_logged = len(self.guard.skipped)
            self._actions.log_skipped(self._n_logged, self.guard.skipped[-1][0])
        if bad_step is None:
            return
        self._actions.release_checkpoints()
        report = self.halt(bad_step)
        self._actions.publish(report.markdown(), report.console(), bad_step.step.number)
        raise report.error()

    def before_update(self, optimizer: Optimizer) -> None:
        """Check the step a last time, right before the update."""
        self.conclude(self.guard.before_update(optimizer))

    def read_rest(self) -> None:
        """Read the results that are still on the device, and raise if one is bad."""
        self.conclude(self.guard.drain())

    def before_saving(self) -> None:
        """Raise if a checkpoint that is about to be written would hold NaN or Inf. Collective."""
        self.read_rest()
        error = self.bad_update(self._actions.step())
        if error is not None:
            self._actions.release_checkpoints()
            raise self._actions.report(error)

    def halt(self, bad_step: BadStep) -> HaltReport:
        """Undo the step, find its cause, and write the capsule, the last good checkpoint and the report."""
        guard, ranks = self.guard, self._ranks
        unrestored = guard.undo(bad_step)
        evidence = examine(
            self._run.module, bad_step, rank=ranks.rank, unrestored=unrestored, carried=guard.carries_losses
        )
        states = bad_optimizer_state(self._run.module, self._run.optimizers)
        bad_states = [state for state in states if state.name not in self._bad_at_start]
        gathered = ranks.objects((evidence, tuple(guard.history), bad_states))
        everyone = [theirs for theirs, _, _ in gathered]
        histories = {theirs.rank: history for theirs, history, _ in gathered}
        bad_states = [state for _, _, theirs in gathered for state in theirs]
        diagnosis = diagnose(everyone, histories)
        report = HaltReport(
            everyone=everyone,
            diagnosis=diagnosis,
            history=histories[everyone[0].rank if diagnosis.rank is None else diagnosis.rank],
            skipped=guard.skipped,
            n_missing=ranks.world_size - len(everyone),
            metrics=list(self._metrics.values()),
        )
        self._run_again(bad_step, evidence, report)
        if any(theirs.parameters for theirs in everyone):
            made = "made bad by this update" if evidence.is_lost else "bad before this step"
            report.checkpoint_note = f"not written: weights or buffers were {made}"
            self._actions.forbid_saving()
        elif bad_states:
            report.checkpoint_note = f"not written: {bad_states[0]} of the optimizer was not finite before this step"
            self._actions.forbid_saving()
        elif self._options.save_last_good:
            name = f"nonfinite-step{evidence.step}-last-good.ckpt"
            report.checkpoint_path, report.checkpoint_note = self._actions.save_checkpoint(name)
        else:
            report.checkpoint_note = "not asked for (save_last_good=False)"
        report.report_path, report.report_note = self._actions.write_report(
            f"nonfinite-step{evidence.step}-report.md", report.markdown()
        )
        return report

    def bad_update(self, step: int) -> NonFiniteError | None:
        """Return an error for weights or optimizer state that became NaN or Inf since training began. Collective.

        Call it before a checkpoint: an update can overflow although its gradients are finite.

        Args:
            step: The present training step.
        """
        mine = tuple(each for each in self._bad_now() if each.name not in self._bad_at_start)
        everyone = self._ranks.objects(mine)
        if not any(everyone):
            return None
        self._actions.forbid_saving()
        rates = [float(group["lr"]) for each in self._run.optimizers for group in each.param_groups if "lr" in group]
        return overflow_error(everyone, step=step, history=self.guard.history, learning_rates=rates)

    def leave_clean_state(self) -> None:
        """Leave a state that a checkpoint may hold after another error. Does not wait for the other ranks."""
        try:
            bad_step = self.guard.drain()
            if bad_step is not None:
                self.guard.undo(bad_step)
                warnings.warn(f"Step {bad_step.step.number} was NaN or Inf too; it was undone.", stacklevel=2)
            if self._actions.saves_on_exception() and self._bad_now():
                self._actions.forbid_saving()
        except RuntimeError as error:  # the device itself may be what failed
            warnings.warn(f"The last steps could not be checked any more: {error}", stacklevel=2)

    def warn_if_blind(self) -> None:
        """Warn, once, if no gradient was seen in an epoch although there are parameters to train."""
        guard, module = self.guard, self._run.module
        if guard.saw_gradients or self._has_warned or not any(p.requires_grad for p in module.parameters()):
            return
        if not self._run.module.automatic_optimization:
            advice = "step the optimizers that self.optimizers() returns, and use self.manual_backward(loss)"
        elif guard.saw_losses:
            advice = "see whether the strategy or an optimizer keeps gradients elsewhere than in p.grad"
        else:
            return  # training_step returned no loss, so there was nothing to see
        self._has_warned = True
        warnings.warn(f"HaltOnNaN saw no gradient in this epoch, so it checks none: {advice}.", stacklevel=2)

    def _run_again(self, bad_step: BadStep, evidence: Evidence, report: HaltReport) -> None:
        """Find the operation and write the capsule, on the rank that had the bad value. Collective."""
        options, rank = self._options, evidence.rank
        if not options.reruns:
            return
        if self.guard.is_sharded or bad_step.is_lost:
            reason = "no rank has all weights" if self.guard.is_sharded else "the weights before the update are lost"
            report.explanation_note = f"not sought: {reason} to run the step again"
            report.capsule = CapsuleNote(note=report.explanation_note)
            return
        rerun, mine = None, RankFindings(rank, None)
        if report.diagnosis.rank in {None, rank}:
            try:
                rerun = BadStepRerun(
                    self._run, bad_step, evidence, tuple(self.guard.history),
                    restored=self.guard.written_and_restored(), outside=self._outside,
                )  # fmt: skip
                mine = rerun.findings(
                    explains=options.explain and not bad_step.update,
                    keeps=options.capsule and self._actions.directory is not None,
                )
                if bad_step.update:
                    mine = replace(mine, note="not sought: forward and backward were finite")
            except Exception as error:  # noqa: BLE001, it must neither hide the halt nor leave the other ranks waiting
                mine = RankFindings(rank, None, f"not found: {type(error).__name__}: {error}")
        findings = findings_to_report(self._patient_ranks.objects(mine), report.diagnosis.rank)
        report.add_findings(findings.rank, findings.explanation, findings.note)
        report.again = findings.again
        report.written = findings.written
        if not options.capsule:
            return
        note = CapsuleNote(note=self._actions.no_directory)
        if self._actions.directory is not None and rerun is not None and findings.rank == rank:
            name = f"nonfinite-step{evidence.step}-rank{rank}-capsule.pt"
            note = rerun.write(self._actions.directory / name, parse_size(options.max_bytes), report.about())
        report.capsule = dict(self._patient_ranks.objects((rank, note))).get(findings.rank, note)

    def _bad_now(self) -> list[BadTensor]:
        module = self._run.module
        return [*bad_state(module), *bad_optimizer_state(module, self._run.optimizers)]
