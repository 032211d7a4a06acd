"""Connects HaltOnNaN's guard to a Trainer, and ends its run at a bad step: undo, evidence, rerun, files and report."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

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
from lightning_memtools.callbacks.guarded import unless_it_fails
from lightning_memtools.memory.nested_tensors import names_of
from lightning_memtools.memory.user_code import short_path
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.bad_step import (
    BadStep,
    HaltStage,
    NonFiniteError,
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
from lightning_memtools.nonfinite.step_file import step_as_plain
from lightning_memtools.nonfinite.step_guard import HaltOptions, HeldBackStep, ReadingWatch, StepGuard, gradients_under
from lightning_memtools.nonfinite.step_rerun import StepConditions, StepRerun, plain_facts, precision_now
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.files import NotWritten, report_directory, write_file, write_report_on_rank_zero
from lightning_memtools.reporting.loggers import log_scalars, log_text
from lightning_memtools.reporting.loss_names import likely_losses
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
        guard: Guards the steps of its training; None as long as there is none.
        sees_batches: Whether hooks see a step's batches: not where training_step takes them from `dataloader_iter`.
    """

    def __init__(self, trainer: Trainer, options: HaltOptions) -> None:
        self._trainer, self._options = trainer, options
        self._ranks = RankGather()
        self._patient_ranks = RankGather(timedelta(seconds=RERUN_TIMEOUT_S))  # for what takes a rerun of the step
        self._directory = report_directory(trainer, options.directory)
        self._undo: list[Callable[[], None]] = []
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
            watch=watch,
        )
        self._module = module
        self.sees_batches = "dataloader_iter" not in inspect.signature(module.training_step).parameters
        self._bad_at_start = frozenset(each.name for each in self._bad_now())
        self._n_logged, self._warned_of_blindness = 0, False
        self._finite_at = training_step(trainer)
        self._undo = [
            guard.close,
            watch_updates(trainer, guard.before_update),
            guard_saving(trainer, self._before_saving),
        ]

    def close(self) -> None:
        """Undo what was switched on, and disconnect from the other ranks. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._ranks.close()
        self._patient_ranks.close()

    def conclude(self, held_back: HeldBackStep | None) -> None:
        """Log the steps that were skipped, and raise if there is a bad step."""
        assert self.guard is not None
        if len(self.guard.skipped) > self._n_logged:
            self._n_logged = len(self.guard.skipped)
            log_scalars(self._trainer, {"nonfinite/skipped": float(self._n_logged)}, self.guard.skipped[-1][0])
        if held_back is None:
            return
        self._release_checkpoints()
        bad = self._halt(self.guard, held_back)
        log_text(self._trainer, "memtools/nonfinite_report", bad.markdown(), bad.step)
        if self._trainer.is_global_zero:
            print_on_console(bad.console(), soft_wrap=True)
        raise bad.error()

    def read_rest(self) -> None:
        """Read the results that are still on the device, and raise if one is bad."""
        if self.guard is not None:
            self.conclude(self.guard.drain())

    def end_evaluation(self, module: LightningModule, stage: HaltStage) -> None:
        """Raise if a loss that an evaluation run has logged is NaN or Inf. Collective.

        Other metrics may rightly be NaN or Inf, and those of the sanity check, of untrained weights, mean nothing.
        """
        if self._trainer.sanity_checking:
            return
        logged = {name: float(value) for name, value in values_logged_in_evaluation(self._trainer).items()}
        bad = {name: value for name, value in logged.items() if likely_losses([name]) and not math.isfinite(value)}
        everyone = self._ranks.objects(bad)
        if any(everyone):
            step = training_step(self._trainer)
            raise self._reported(evaluation_error(everyone, stage=stage, step=step, weights=bad_state(module)))

    def _before_saving(self) -> None:
        """Raise if a checkpoint that is about to be written would hold NaN or Inf. Collective.

        An update can overflow although its gradients are finite, and buffers are written by forward.
        """
        self.read_rest()
        step = training_step(self._trainer)
        states = bad_optimizer_state(self._module, self._trainer.optimizers)
        gathered = self._ranks.objects(
            [[bad for bad in kind if bad.name not in self._bad_at_start] for kind in (bad_state(self._module), states)]
        )
        if not any(kind for theirs in gathered for kind in theirs):
            self._finite_at = step
            return
        assert self.guard is not None
        # Finite gradients can make Inf of an optimizer's state, but no NaN.
        is_state = any(bad.n_nan for _, states in gathered for bad in states)
        everyone = [[*states, *weights] if is_state else [*weights, *states] for weights, states in gathered]
        weights: list[BadTensor] = [] if is_state else next(filter(None, (weights for weights, _ in gathered)), [])
        forbid_saving_on_exception(self._trainer)
        error = state_error(
            everyone,
            step=step,
            finite_at=self._finite_at,
            suspects=suspects_of_update(self._module, self._trainer.optimizers, weights),
            history=self.guard.history,
        )
        self._release_checkpoints()
        raise self._reported(error)

    def leave_clean_state(self) -> None:
        """Undo a bad step that was not read yet, after another error: a checkpoint may follow."""
        if self.guard is None:
            return
        try:
            held_back = self.guard.drain()
            if held_back is not None:
                self.guard.undo(held_back)
                warnings.warn(f"Step {held_back.step.number} was NaN or Inf too; it was undone.", stacklevel=2)
            if saves_on_exception(self._trainer) and self._bad_now():
                forbid_saving_on_exception(self._trainer)
        except RuntimeError as error:  # the device itself may be what failed
            warnings.warn(f"The last steps could not be checked any more: {error}", stacklevel=2)

    def warn_if_blind(self) -> None:
        """Warn, once, if no gradient was seen although there were losses, or steps that the user takes by hand."""
        guard, module = self.guard, self._module
        assert guard is not None
        is_blind = not guard.saw_gradients and (guard.saw_losses or not module.automatic_optimization)
        weights = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        # Where no optimizer trains weights, as in PatchCore, there is nothing to see.
        if is_blind and not self._warned_of_blindness and weights & {id(p) for g in groups for p in g["params"]}:
            self._warned_of_blindness = True
            warnings.warn(
                "HaltOnNaN saw no gradient in this epoch, so it checks none. In manual optimization, use "
                "self.optimizers() and self.manual_backward(loss); else see whether the strategy or an optimizer keeps "
                "gradients elsewhere than in p.grad.",
                stacklevel=2,
            )

    def _halt(self, guard: StepGuard, held_back: HeldBackStep) -> BadStep:
        """Undo the step, find its cause, write the step, the last good checkpoint and the report. Collective.

        Each piece between two exchanges is guarded: whatever fails in it, all ranks raise, with what is known.
        """
        mine = unless_it_fails(lambda: self._examined(guard, held_back), lambda error: _hardly_known(held_back, error))
        mine.rank = self._ranks.rank
        everyone = self._ranks.objects(mine)
        culprit = culprit_of(everyone)
        checkpoint_path, checkpoint_note = self._save_last_good(everyone)
        if self._options.explain or self._options.save_step:
            rerun, digests = None, dict[str, str]()
            if culprit is None or culprit.rank == mine.rank:
                rerun = unless_it_fails(lambda: self._rerun(mine, held_back), lambda error: _not_found(mine, error))
            if rerun is not None:
                again, explains = rerun, self._options.explain
                digests = unless_it_fails(
                    lambda: run_again(mine, again, explains=explains), lambda error: _not_found(mine, error) or {}
                )
            everyone = self._patient_ranks.objects(mine)
            culprit = culprit_of(everyone)
            if self._options.save_step:
                if rerun is not None and mine.rank == (culprit or everyone[0]).rank:
                    name, again = "" if checkpoint_path is None else checkpoint_path.name, rerun
                    unless_it_fails(
                        lambda: self._write_step(mine, held_back, again, digests, checkpoint=name),
                        lambda error: setattr(mine, "step_note", f"could not be written: {error}"),
                    )
                everyone = self._patient_ranks.objects(mine)
        named = culprit or everyone[0]
        told = next((each for each in everyone if each.rank == named.rank), mine)
        told = replace(
            told,
            is_culprit=culprit is not None,
            others=tuple(each for each in everyone if each.rank != told.rank),
            n_missing=self._ranks.world_size - len(everyone),
            skipped=tuple(guard.skipped),
            checkpoint_path=checkpoint_path,
            checkpoint_note=checkpoint_note,
        )
        told.report_path, told.report_note = self._write_report(f"nonfinite-step{told.step}-report.md", told.markdown())
        return told

    def _examined(self, guard: StepGuard, held_back: HeldBackStep) -> BadStep:
        unrestored = guard.undo(held_back)
        untoggle_all(self._module)
        return examine(
            self._module,
            held_back,
            self._trainer.optimizers,
            carries_losses=guard.carries_losses,
            unrestored=unrestored,
            history=tuple(guard.history),
            bad_at_start=self._bad_at_start,
        )

    def _rerun(self, bad: BadStep, held_back: HeldBackStep) -> StepRerun | None:
        is_sharded = self.guard is not None and self.guard.is_sharded
        if is_sharded or any(micro.batch is None for micro in held_back.step.micro):
            why = "no rank has all weights" if is_sharded else "hooks do not see its batch"
            bad.why_no_operation = bad.step_note = f"not sought: {why}, so that the step cannot be run again"
            return None
        return StepRerun(
            self._module,
            held_back.step.micro,
            step_conditions(self._trainer),
            optimizers=self._trainer.optimizers,
            parameters=held_back.step.parameters,
            trainer=self._trainer,
            host=host_memory,
        )

    def _write_step(
        self,
        bad: BadStep,
        held_back: HeldBackStep,
        rerun: StepRerun,
        digests: dict[str, str],
        *,
        checkpoint: str,
    ) -> None:
        saved = step_as_plain(
            bad,
            self._module,
            rerun.micro,
            rerun.conditions,
            parameters=names_of(self._module, held_back.step.parameters),
            digests=digests,
            checkpoint=checkpoint,
        )
        name = f"nonfinite-step{bad.step}-rank{bad.rank}.pt"
        written = write_file(self._directory, name, lambda path: torch.save(saved, path))
        if isinstance(written, NotWritten):
            bad.step_note = written.reason
        else:
            bad.step_path = written

    def _save_last_good(self, everyone: list[BadStep]) -> tuple[Path | None, str]:
        """Write the checkpoint before the bad step, unless that would hold NaN or Inf. Collective."""
        bad = [tensor for each in everyone for tensor in (*each.parameters, *each.states)]
        if bad:
            forbid_saving_on_exception(self._trainer)
            return None, f"not written: weights or buffers were bad before this step: {bad[0]}"
        if not self._options.save_last_good:
            return None, "not asked for (save_last_good=False)"
        if isinstance(self._directory, NotWritten):
            return None, self._directory.reason
        path = self._directory / f"nonfinite-step{everyone[0].step}-last-good.ckpt"

        def save() -> str:
            if self._ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self._trainer, path)
            return ""

        failure = self._ranks.objects(unless_it_fails(save, lambda error: f"could not be written: {error}"))[0]
        return (None, failure) if failure else (path, "")

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


def _hardly_known(held_back: HeldBackStep, error: str) -> BadStep:
    """Return a bad step that could not be examined."""
    losses = tuple((0, loss) for loss in held_back.losses)
    bad = BadStep(step=held_back.step.number, losses=losses, norm=held_back.norm, gradients=held_back.gradients)
    bad.batches = tuple(micro.index for micro in held_back.step.micro)
    infer(bad)
    bad.because = f"the step could not be examined ({error})."
    return bad


def _not_found(bad: BadStep, error: str) -> Any:
    """Note why the operation was not found, and return None."""
    bad.why_no_operation = f"not found: {error}"


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
