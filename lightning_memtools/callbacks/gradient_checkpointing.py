"""GradientCheckpointing: less memory for activations, by computing some of them twice."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback, ended_by_sigterm, is_compiled_by_lightning, training_step
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import is_compiled
from lightning_memtools.checkpointing.checkpoint_options import BnDropout, CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.reporting.console import print_on_console, progress_printed
from lightning_memtools.reporting.files import NO_RUN, NotWritten, report_directory, write_report_or_warn
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.strategies import why_unsupported
from lightning_memtools.reporting.tables import console_table
from lightning_memtools.simulation.step_trace import TracedStep, device_of
from lightning_memtools.simulation.trainer_stand_in import forward_of

# The first step makes the optimizer's state; from the second on, a step's peak is that of every step.
_MEASURED_STEP = 3
_REPORT = "checkpoint_plan.md"


class GradientCheckpointing(EitherCallback):
    """Trains with less memory: recomputes parts of the model in backward instead of keeping their activations.

    On the first training batch it traces a step on fake tensors, chooses what to recompute, predicts the peak, and
    applies the plan if that lowers the peak. Gradients, weights, running statistics and random numbers are bit for bit
    those of the plain run. Names, types, state_dict and checkpoints stay as they are; copies and pickles are of the
    plain model. Everything is undone when fit ends or fails.

    | It writes | content |
    | --- | --- |
    | `memtools/checkpoint_plan` (text, to loggers that take it) | what is recomputed, what is left out, bytes, peaks |
    | `<log_dir>/memtools/checkpoint_plan.md` | the same |
    | console, rank 0 | the same |

    After the third step the measured peak is added to the predicted one. In the first step every recomputed range runs
    two more times, to prove that it repeats itself bit for bit; a layer that does not is left out of the plan.

    Forward hooks on layers within recomputed ranges fire again in backward. Compiled models, and models under FSDP and
    DeepSpeed, are left unchanged, with a warning that says why.

    Args:
        segments: Cut each Sequential into this many chunks, all but the last recomputed, at the boundaries with the
            lowest peak. "auto" takes the plan with the lowest product of activation memory and operations, with at
            most a third more operations than without.
        memory_budget: A float is the share of the plain step's activation memory that the plan may have; a size such
            as "8GiB" is the highest allocated peak. The plan with the least recomputation that fits is taken.
        bn_dropout: What may happen to BatchNorm and Dropout layers of a Sequential: with "skip" they never run twice;
            with "recompute" they may, and the results are the same bit for bit; with "avoid" nothing that contains
            one runs twice; "auto" is "skip", or "recompute" where "skip" leaves nothing worth doing.
        include: Patterns of module names to take instead of choosing among all modules, such as ["blocks.*"]. A match
            that is no Sequential becomes one recomputed segment.
        exclude: Patterns of modules that are never recomputed.

    Raises:
        ValueError: An argument is not among those accepted. From fit: a pattern matches no module, or no plan fits
            the budget.
    """

    is_in_trial = False
    """BatchSizeTuner sets this for the time of a trial, whose batch may be too small for a share to be reached."""

    parts_of_a_run = ("_applied", "_window")  # what is applied stays with the original: it is undone once

    def __init__(
        self,
        *,
        segments: int | Literal["auto"] = "auto",
        memory_budget: float | str | None = None,
        bn_dropout: BnDropout = "skip",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        self._options = CheckpointOptions.parse(segments, memory_budget, bn_dropout, include, exclude)
        self.segments = segments
        self.memory_budget = memory_budget
        self.bn_dropout = bn_dropout
        self.include = include
        self.exclude = exclude
        self.plan: CheckpointPlan | None = None
        self._planned = False
        self._steps = 0
        self._applied: AppliedPlan | None = None
        self._window: PeakWindow | None = None
        self._directory: Path | NotWritten = NO_RUN

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what an earlier fit may have left, and start again."""
        self._undo()
        self._planned = False
        self._steps = 0
        self._options = replace(self._options, differing=frozenset())
        self._directory = report_directory(trainer) if stage == "fit" else NO_RUN

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan on the first batch; measure the peak of a later step."""
        if not self._planned:
            self._planned = True
            self._plan_and_apply(trainer, pl_module, batch, batch_idx)
        elif self._applied is not None and not self._applied.differing.keys() <= self._options.differing:
            self._plan_again(trainer, pl_module, batch, batch_idx)
        self._steps += 1
        if self._steps == _MEASURED_STEP and self.plan is not None and self.plan.planned is not None:
            reader = reader_for(trainer.strategy.root_device)
            if reader is not None and reader.stats().peak_allocated is not None:
                self._window = peak_counter(reader).open()
                self._window.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the measured peak beside the predicted one."""
        if self._window is None:
            return
        self._window.pause()
        measured = self._window.allocated
        self._window.close()
        self._window = None
        assert self.plan is not None
        if measured is not None and trainer.is_global_zero:
            self._write(trainer, self.plan.table(measured))
            print_on_console(f"GradientCheckpointing: {self.plan.figures(measured)[-1]}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the plan."""
        self._undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the plan."""
        self._undo()

    def _undo(self) -> None:
        if self._applied is not None:
            self._applied.remove()
        if self._window is not None:
            self._window.close()
        self._applied = self._window = None

    def _plan_and_apply(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        made = _why_unplanned(trainer, pl_module) or self._plan_on_rank_zero(trainer, pl_module, batch, batch_idx)
        if isinstance(made, str):
            if trainer.is_global_zero:
                warnings.warn(f"GradientCheckpointing leaves the model unchanged: {made}.", stacklevel=2)
            return
        self.plan = made
        if trainer.is_global_zero and made.plain is not None:
            self._show(trainer, made)
        self._applied = made.apply(pl_module)

    def _plan_again(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan without the layers that did not repeat themselves in the first step.

        Each rank for itself, which no other one waits for: plans may differ between ranks, gradients do not.
        """
        assert self._applied is not None
        assert self.plan is not None
        known = self._options.differing | self._applied.differing.keys()
        self._options = replace(self._options, differing=frozenset(known))
        self._applied.remove()
        made = self._planned_here(trainer, pl_module, batch, batch_idx)
        if isinstance(made, Exception):
            warnings.warn(
                f"GradientCheckpointing recomputes nothing any more: without {', '.join(sorted(known))}, which did not "
                f"do the same when run again, there is no plan ({made}).",
                stacklevel=2,
            )
            self._applied = None
            return
        self.plan = made
        if trainer.is_global_zero:
            self._show(trainer, made)
        self._applied = made.apply(pl_module)

    def _plan_on_rank_zero(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> CheckpointPlan | str:
        """Returns on every rank the plan of rank 0, or the reason why there is none. Collective.

        Raises:
            ValueError: A pattern matches no module, or no plan fits the budget.
        """
        mine = self._planned_here(trainer, pl_module, batch, batch_idx) if trainer.is_global_zero else None
        # Failures are broadcast too, so that no rank is left waiting.
        made = trainer.strategy.broadcast(mine)
        if made is None:
            # In a trial of BatchSizeTuner, nothing that one rank decides reaches another: each plans for itself.
            made = self._planned_here(trainer, pl_module, batch, batch_idx)
        if isinstance(made, (ValueError, torch.OutOfMemoryError)):
            raise made
        if isinstance(made, Exception):
            return (
                f"a step could not be traced on fake tensors ({type(made).__name__}: "
                f"{str(made).partition(chr(10))[0]}). plan_checkpoints(module, sample) can plan a part of the model "
                "that does not read values"
            )
        return made

    def _planned_here(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> CheckpointPlan | Exception:
        """Returns this rank's plan, or the error that planning raised."""
        step = TracedStep(
            pl_module,
            batch,
            forward_of(trainer, pl_module, batch_idx),
            tuple(trainer.optimizers),
            device=device_of(cuda=trainer.strategy.root_device.type == "cuda"),
        )
        planner = StepPlanner(step)
        try:
            with ended_by_sigterm(), progress_printed(lambda: f"GradientCheckpointing is {planner.progress.doing}"):
                return planner.plan(self._options, nearest=self.is_in_trial)
        except BudgetTooSmallError as error:
            # For a trial of BatchSizeTuner, a size that is exceeded is a device that is full: a smaller batch may fit.
            return torch.OutOfMemoryError(str(error)) if self.is_in_trial else error
        except Exception as error:  # noqa: BLE001, the user's step runs here and may raise anything on fake tensors
            return error.with_traceback(None)

    def _show(self, trainer: Trainer, plan: CheckpointPlan) -> None:
        self._write(trainer, plan.table())
        print_on_console(console_table(plan.rows()))
        if plan.refused is not None:
            print_on_console(f"GradientCheckpointing recomputes nothing. {plan.refused}")
        else:
            print_on_console("GradientCheckpointing: " + "; ".join(plan.figures()))

    def _write(self, trainer: Trainer, text: str) -> None:
        write_report_or_warn(self._directory, _REPORT, text)
        log_text(trainer, "memtools/checkpoint_plan", text, training_step(trainer))


def _why_unplanned(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Returns why the model cannot be planned; None if it can."""
    reason = why_unsupported(GradientCheckpointing.__name__, type(trainer.strategy))
    if reason is None and (is_compiled_by_lightning(pl_module) or is_compiled(pl_module)):
        return (
            "it is compiled. torch.compile recomputes by itself with torch._functorch.config.activation_memory_budget"
        )
    return reason
