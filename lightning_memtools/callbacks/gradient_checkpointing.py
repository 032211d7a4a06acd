"""GradientCheckpointing: less memory for activations, by computing some of them twice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback, is_compiled_by_lightning, training_step
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.checkpointing.checkpoint_options import (
    BnDropout,
    CheckpointOptions,
    CheckpointOptionsError,
    LossHead,
)
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.user_code import user_line_of
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.simulation.step_runner import Recipe
from lightning_memtools.simulation.tracer import NoLossError, StepRequest
from lightning_memtools.warning_categories import DegradedWarning

# The first step makes the optimizer's state; from the second on, a step's peak is that of every step.
_FIRST_MEASURED = 3
# In batches. Those that give no loss are skipped by the training; a step may return none in its first few calls.
_MOST_WITHOUT_LOSS = 10

_Made = CheckpointPlan | CheckpointOptionsError | torch.OutOfMemoryError | NoLossError | str


class GradientCheckpointing(EitherCallback, Neighbour):
    """Trains with less memory: recomputes parts of the model in backward instead of keeping their activations.

    On the first training batch it traces a step on fake tensors (without data) and plans what to recompute. The plan is
    applied if it lowers the predicted peak. Gradients, weights, running statistics and random numbers are bit for bit
    the same as without the plan; they differ by rounding if the loss of a language model is computed in chunks. Module
    names, types, state_dict and checkpoints do not change; copies and pickles of the model hold no trace of the plan.
    Everything is undone when fit ends or fails.

    | It writes | content |
    | --- | --- |
    | `memtools/checkpoint_plan` (text, to loggers that take it) | what is recomputed, what is left out, bytes, peaks |
    | `<log_dir>/memtools/checkpoint_plan.md` | the same text |
    | console, rank 0 | what is recomputed, bytes, peaks |

    After the third step the measured peak is written next to the predicted one. In the first step every recomputed
    part runs two more times, to check that it gives the same values bit for bit. If the values differ, the part is not
    recomputed from then on, and a warning names the layer.

    Forward hooks on recomputed layers fire again in backward. Under FSDP 2 (ModelParallelStrategy) every recomputed
    part lies within one sharded module, and `memory_budget` has to be a fraction. Compiled models, and models under
    FSDP 1 and DeepSpeed, are left unchanged, with a warning that says why.

    Args:
        segments: Each Sequential is cut into this many equal chunks, of which all but the last are recomputed, as in
            `torch.utils.checkpoint.checkpoint_sequential`. "auto" takes the plan with the lowest product of activation
            memory and operations, with at most a third more operations than an ordinary step.
        memory_budget: A float is the fraction of an ordinary step's activation memory that may be used. A size such as
            "8GiB" is the highest allowed peak of allocated memory. Of the plans that fit, the one with the least
            recomputation is taken.
        bn_dropout: With "skip", BatchNorm and Dropout layers of a Sequential are never recomputed. With "recompute"
            they may be, and the results are still the same bit for bit.
        include: Name patterns of the modules that may be recomputed, such as ["blocks.*"]; by default any module may.
        exclude: Name patterns of modules that are never recomputed.
        loss_head: With "auto", a linear layer and the cross-entropy of its output are computed in chunks of rows, if
            that lowers the peak and nothing else reads the output. With "keep", they are computed as the model does.

    Raises:
        ValueError: An argument is invalid; or, during fit, a pattern matches no module, or no plan fits the budget.
    """

    parts_of_a_run = ("_applied", "_window")  # what is applied stays with the original: it is undone once

    def __init__(
        self,
        *,
        segments: int | Literal["auto"] = "auto",
        memory_budget: float | str | None = None,
        bn_dropout: BnDropout = "skip",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        loss_head: LossHead = "auto",
    ) -> None:
        self._options = CheckpointOptions.parse(segments, memory_budget, bn_dropout, include, exclude, loss_head)
        self.segments = segments
        self.memory_budget = memory_budget
        self.bn_dropout = bn_dropout
        self.include = include
        self.exclude = exclude
        self.loss_head = loss_head
        self.plan: CheckpointPlan | None = None
        self._is_planned = self._was_measured = False
        self._steps = 0
        self._applied: AppliedPlan | None = None
        self._window: PeakWindow | None = None
        self._directory: Path | NotWritten = NO_RUN

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the checkpoint plan of an earlier fit, if it is still applied, and prepare for a new one."""
        self._undo()
        self._is_planned = self._was_measured = False
        self._steps = 0
        self._directory = report_directory(trainer)  # here, because it asks rank 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make and apply the checkpoint plan on the first batch with a loss. Later, measure the peak of one step.

        Every rank has to call this hook, because rank 0 sends the plan to the others.

        Raises:
            CheckpointOptionsError: A pattern matches no module, or no plan fits the budget.
        """
        if not self._is_planned:
            self._is_planned = True
            self._plan_and_apply(trainer, pl_module, batch, batch_idx)
        # A late step, which ends an accumulation, is the one whose peak is measured.
        ends = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_late = ends and not self._was_measured and self._steps + 1 >= _FIRST_MEASURED
        reader = reader_for(trainer.strategy.root_device) if is_late and self._applied is not None else None
        if reader is not None and reader.stats().peak_allocated is not None:
            self._window = peak_counter(reader).open()
            self._window.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once the peak of a step has been measured, write it next to the predicted peak in the report."""
        # For a step that gives no loss, which Lightning skips, it has no outputs.
        gave_loss = bool(outputs) or not pl_module.automatic_optimization
        self._steps += gave_loss
        if self._window is None or self.plan is None:
            return
        self._window.pause()
        measured = self._window.allocated
        self._window = None
        self._was_measured = gave_loss
        if measured is not None and gave_loss and trainer.is_global_zero:
            self._write(trainer, self.plan.page(measured))
            print_on_console(f"GradientCheckpointing: {self.plan.figures(measured)[-1]}")

    def _write(self, trainer: Trainer, text: str) -> None:
        write_report_or_warn(self._directory, "checkpoint_plan.md", text)
        log_text(trainer, "memtools/checkpoint_plan", text, training_step(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the checkpoint plan, so that the model is as it was."""
        self._undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the checkpoint plan, so that the model is as it was."""
        self._undo()

    def _undo(self) -> None:
        if self._applied is not None:
            self._applied.remove()
        if self._window is not None:
            self._window.close()
        self._applied = self._window = None

    def _plan_and_apply(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make a plan and apply it, or warn why there is none.

        Rank 0 plans for all ranks. If planning fails, rank 0 broadcasts the error, so that no rank is left waiting.
        """
        made: _Made | None = _why_unplanned(trainer, module)
        if made is None:
            mine = self._planned_here(trainer, module, batch, batch_idx) if trainer.is_global_zero else None
            made = trainer.strategy.broadcast(mine)
        if made is None:
            # In a trial of BatchSizeTuner, nothing that one rank decides reaches another: each plans for itself.
            made = self._planned_here(trainer, module, batch, batch_idx)
        if isinstance(made, CheckpointPlan):
            self.plan, self._applied = made, made.apply(module)
            if trainer.is_global_zero:
                self._write(trainer, made.page())
                figures = () if made.refused is not None else made.figures()
                print_on_console("GradientCheckpointing: " + "; ".join((made.sentence().rstrip("."), *figures)))
        elif isinstance(made, (CheckpointOptionsError, torch.OutOfMemoryError)):
            raise made
        elif isinstance(made, NoLossError) and batch_idx < _MOST_WITHOUT_LOSS:
            self._is_planned = False  # Lightning skips such a batch; the next one may give a loss
        elif trainer.is_global_zero:
            text = f"GradientCheckpointing leaves the model unchanged: {str(made).rstrip('.')}."
            warnings.warn(text, DegradedWarning, stacklevel=2)

    def _planned_here(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> _Made:
        """Make a plan on this rank. Return the plan, an error to raise on all ranks, or a description of an error.

        An error in the user's code is returned as a string, because the exception may not be picklable.
        """
        step = StepRequest(
            model=module,
            batch=batch,
            recipe=Recipe(precision=None, accumulate=trainer.accumulate_grad_batches, clip=trainer.gradient_clip_val),
            optimizer=trainer.optimizers,
            cuda=trainer.strategy.root_device.type == "cuda",
            trainer=trainer,
            batch_idx=batch_idx,
        )
        try:
            with progress_printed(lambda: "GradientCheckpointing is choosing what to recompute"):
                return StepPlanner(step).plan(self._options, nearest=self.is_in_trial)
        except BudgetTooSmallError as error:
            # For a trial of BatchSizeTuner, a size that is exceeded is a device that is full: a smaller batch may fit.
            return torch.OutOfMemoryError(str(error)) if self.is_in_trial else error
        except (CheckpointOptionsError, NoLossError, torch.OutOfMemoryError) as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001, the user's step runs here and may raise anything on fake tensors
            line = user_line_of(error)
            do = "Plan" if line is None else f"Change {line}, or plan"
            return (
                f"a step could not be traced on fake tensors ({in_one_line(error)}). {do} the part of the model that "
                "can be traced: plan_checkpoints(module, sample)"
            )


def _why_unplanned(trainer: Trainer, module: LightningModule) -> str | None:
    """Return the reason why this strategy or model rules out a checkpoint plan; None if there is no such reason."""
    reason = why_unsupported("GradientCheckpointing", type(trainer.strategy))
    if reason is None and (is_compiled_by_lightning(module) or is_compiled(module)):
        return (
            "it is compiled, and torch.compile recomputes by itself: set "
            "torch._functorch.config.activation_memory_budget, such as 0.5, before it is compiled"
        )
    return reason
