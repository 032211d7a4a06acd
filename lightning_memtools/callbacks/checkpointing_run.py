"""Connects the checkpoint planner to a Trainer: the step that it traces, the ranks that share a plan, the reports."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_memtools._lightning import is_compiled_by_lightning, training_step
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, CheckpointOptionsError
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.simulation.step_runner import without_lbfgs
from lightning_memtools.simulation.step_trace import NoLossError, TracedStep, device_of
from lightning_memtools.warning_categories import DegradedWarning

# The first step makes the optimizer's state; from the second on, a step's peak is that of every step.
_FIRST_MEASURED = 3
_REPORT = "checkpoint_plan.md"
# Batches that give no loss are skipped by the training; a step may return none in its first few calls.
_MOST_WITHOUT_LOSS = 10


_Made = CheckpointPlan | CheckpointOptionsError | torch.OutOfMemoryError | NoLossError | str


class CheckpointingRun:
    """GradientCheckpointing in one fit.

    Args:
        trainer: The Trainer.
        options: The arguments of GradientCheckpointing.

    Attributes:
        plan: The plan of this fit; None until one is made.
        is_in_trial: Whether this is a trial of BatchSizeTuner, whose batch may be too small for a share to be reached.
    """

    def __init__(self, trainer: Trainer, options: CheckpointOptions) -> None:
        self._trainer, self._options = trainer, options
        self._directory = report_directory(trainer)
        self._steps = 0
        self._without_loss = 0
        self._is_planned = False
        self._was_measured = False
        self._applied: AppliedPlan | None = None
        self._window: PeakWindow | None = None
        self.plan: CheckpointPlan | None = None
        self.is_in_trial = False

    def begin_step(self, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan on the first batch that gives a loss and apply the plan; begin to measure the peak of a later step.

        Collective until there is a plan.

        Raises:
            CheckpointOptionsError: A pattern matches no module, or no plan fits the budget.
        """
        if not self._is_planned:
            self._is_planned = True
            self._plan_and_apply(module, batch, batch_idx)
            if self._trainer.received_sigterm:  # Lightning itself would look after the batch
                raise SIGTERMException
        elif self._applied is not None and not self._applied.differing.keys() <= self._options.differing:
            self._plan_again(self._applied, module, batch, batch_idx)
        elif self._applied is not None and any(head.is_off for head in self._applied.heads.values()):
            self._options = replace(self._options, loss_head="keep")
            self._plan_again(self._applied, module, batch, batch_idx)
        if self._measures(batch_idx):
            reader = reader_for(self._trainer.strategy.root_device)
            if reader is not None and reader.stats().peak_allocated is not None:
                self._window = peak_counter(reader).open()
                self._window.resume()

    def _measures(self, batch_idx: int) -> bool:
        """Return whether this batch is the one whose peak is measured: a late one, which ends an accumulation."""
        ends = (batch_idx + 1) % self._trainer.accumulate_grad_batches == 0
        if self._was_measured or self._steps + 1 < _FIRST_MEASURED or not ends:
            return False
        return self.plan is not None and self.plan.planned is not None

    def end_step(self, *, gave_loss: bool) -> None:
        """Write the measured peak beside the predicted one, once it is known."""
        self._steps += gave_loss
        if self._window is None or self.plan is None:
            return
        self._window.pause()
        measured = self._window.allocated
        self._window.close()
        self._window = None
        self._was_measured = gave_loss
        if measured is not None and gave_loss and self._trainer.is_global_zero:
            self._write(self.plan.page(measured))
            print_on_console(f"GradientCheckpointing: {self.plan.figures(measured)[-1]}")

    def undo(self) -> None:
        """Restore the model, and stop measuring."""
        if self._applied is not None:
            self._applied.remove()
        if self._window is not None:
            self._window.close()
        self._applied = self._window = None

    def _plan_and_apply(self, module: LightningModule, batch: Any, batch_idx: int) -> None:
        made = _why_unplanned(self._trainer, module) or self._plan_on_rank_zero(module, batch, batch_idx)
        if isinstance(made, CheckpointPlan):
            self._apply(made, module)
        elif isinstance(made, NoLossError) and self._without_loss < _MOST_WITHOUT_LOSS:
            self._without_loss += 1
            self._is_planned = False
        elif self._trainer.is_global_zero:
            warnings.warn(f"GradientCheckpointing leaves the model unchanged: {made}.", DegradedWarning, stacklevel=2)

    def _plan_again(self, applied: AppliedPlan, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan without the layers that did not repeat themselves in the first step.

        Each rank plans on its own and waits for no other: plans may differ between ranks, gradients do not.
        """
        known = self._options.differing | applied.differing.keys()
        self._options = replace(self._options, differing=frozenset(known))
        applied.remove()
        self._applied = None
        made = self._planned_here(module, batch, batch_idx)
        if not isinstance(made, CheckpointPlan):
            warnings.warn(
                f"GradientCheckpointing recomputes nothing any more: without {', '.join(sorted(known))}, which did not "
                f"do the same when run again, there is no plan ({made}).",
                DegradedWarning,
                stacklevel=2,
            )
            return
        self._apply(made, module)

    def _apply(self, plan: CheckpointPlan, module: LightningModule) -> None:
        self.plan = plan
        if self._trainer.is_global_zero and plan.plain is not None:
            self._show(plan)
        self._applied = plan.apply(module)

    def _plan_on_rank_zero(
        self, module: LightningModule, batch: Any, batch_idx: int
    ) -> CheckpointPlan | NoLossError | str:
        """Return on every rank the plan of rank 0, or the reason why there is none. Collective.

        Raises:
            CheckpointOptionsError: A pattern matches no module, or no plan fits the budget.
        """
        mine = self._planned_here(module, batch, batch_idx) if self._trainer.is_global_zero else None
        # Failures are broadcast too, so that no rank is left waiting.
        made: _Made | None = self._trainer.strategy.broadcast(mine)
        if made is None:
            # In a trial of BatchSizeTuner, nothing that one rank decides reaches another: each plans for itself.
            made = self._planned_here(module, batch, batch_idx)
        if isinstance(made, (CheckpointOptionsError, torch.OutOfMemoryError)):
            raise made
        if isinstance(made, NoLossError):
            return NoLossError(f"training_step gave no loss for any of the first {_MOST_WITHOUT_LOSS + 1} batches")
        return made

    def _planned_here(self, module: LightningModule, batch: Any, batch_idx: int) -> _Made:
        """Return this rank's plan, the error of ours that planning raised, or what is to be said of another error.

        An error of the user's own class is not sent to other ranks: it may not survive pickling.
        """
        optimizers, history_bytes = without_lbfgs(self._trainer.optimizers)
        step = TracedStep(
            module,
            batch,
            None,
            optimizers,
            device=device_of(cuda=self._trainer.strategy.root_device.type == "cuda"),
            trainer=self._trainer,
            batch_idx=batch_idx,
            held_bytes=self._held_by_callbacks(module) + history_bytes,
        )
        planner = StepPlanner(step)
        try:
            told = progress_printed(lambda: f"GradientCheckpointing is {planner.progress.doing}")
            with told:
                return planner.plan(self._options, nearest=self.is_in_trial)
        except BudgetTooSmallError as error:
            # For a trial of BatchSizeTuner, a size that is exceeded is a device that is full: a smaller batch may fit.
            return torch.OutOfMemoryError(str(error)) if self.is_in_trial else error
        except (CheckpointOptionsError, NoLossError, torch.OutOfMemoryError) as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001, the user's step runs here and may raise anything on fake tensors
            line = user_line_of(error)
            where = "" if line is None else f", at {line}"
            return (
                f"a step could not be traced on fake tensors ({in_one_line(error)}{where}). Change that line, or plan "
                "the part of the model that does not run it: plan_checkpoints(module, sample)"
            )

    def _held_by_callbacks(self, model: LightningModule) -> int:
        """Return the bytes of modules that callbacks hold on the device, such as Lightning's WeightAveraging."""
        own = set(map(id, (*model.parameters(), *model.buffers())))
        held = {
            id(one): one.nbytes
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
            for part in vars(callback).values()
            if isinstance(part, nn.Module)
            for one in (*part.parameters(), *part.buffers())
            if one.device == self._trainer.strategy.root_device and id(one) not in own
        }
        return sum(held.values())

    def _show(self, plan: CheckpointPlan) -> None:
        self._write(plan.page())
        figures = () if plan.refused is not None else plan.figures()
        print_on_console("GradientCheckpointing: " + "; ".join((plan.sentence().rstrip("."), *figures)))

    def _write(self, text: str) -> None:
        write_report_or_warn(self._directory, _REPORT, text)
        log_text(self._trainer, "memtools/checkpoint_plan", text, training_step(self._trainer))


def _why_unplanned(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why the model cannot be planned; None if it can."""
    reason = why_unsupported("GradientCheckpointing", type(trainer.strategy))
    if reason is None and (is_compiled_by_lightning(module) or is_compiled(module)):
        return (
            "it is compiled, and torch.compile recomputes by itself: set "
            "torch._functorch.config.activation_memory_budget, such as 0.5, before it is compiled"
        )
    return reason
