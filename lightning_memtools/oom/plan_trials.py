"""Traces the failed step with checkpoint plans, to find one that lowers its peak and one that makes it fit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_memtools._torch import AnyBatchNorm, AnyDropout
from lightning_memtools.checkpointing.chains import NothingToApplyTo, candidates
from lightning_memtools.checkpointing.checkpoint_options import BnDropout, CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.loss_in_chunks import LossInChunks, loss_in_chunks
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.memory.sizes import MIB, format_size
from lightning_memtools.oom.deadline import Deadline, OutOfTimeError

if TYPE_CHECKING:
    from lightning_memtools.oom.step_trials import StepTrials

_BUDGET_TRIALS = 4
# Memory budgets that are closer than this, as a share of them, are not told apart.
_BUDGET_STEP = 0.01
# As a share of the step's computation. Nothing is gained where recomputation costs even less.
LEAST_PRICE = 0.01
# Peaks that are computed from a profile are within some percent of traced ones.
_FAR_TOO_MUCH = 1.25


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A checkpoint plan, the callback that makes it, and the estimate of the step with it where it was traced."""

    plan: CheckpointPlan
    code: str
    estimate: MemoryEstimate | None = None


class PlanTrials:
    """Tries checkpoint plans on a failed step, which is profiled once for all of them."""

    def __init__(self, trials: StepTrials, deadline: Deadline) -> None:
        self._trials = trials
        self._deadline = deadline

    @cached_property
    def _planner(self) -> StepPlanner:
        return StepPlanner(self._trials.failed.step())

    @cached_property
    def in_chunks(self) -> LossInChunks | None:
        """The failed step traced with its loss in chunks, under the plan that is applied, if there is one.

        None for a model without a cross-entropy whose loss can be computed in chunks.
        """
        applied = self._trials.failed.run.plan
        if applied is None:
            found = self._planner.step_in_chunks()
            self._deadline.check()  # the planner takes any error of the trace for "no chunks", this one too
            return found
        return loss_in_chunks(self._trials.failed.step(), applied.chains)

    @cached_property
    def best(self) -> PlanTrial:
        """The plan that GradientCheckpointing chooses by itself, or that of another setting if it lowers the peak more.

        Repeated blocks that are in no Sequential are taken where it finds nothing by itself; BatchNorm and Dropout are
        recomputed where the step does not fit otherwise.
        """
        best = self._chosen()
        blocks = candidates(self._trials.failed.run.model)
        if best.plan.plain is None and blocks:
            best = self._chosen(include=blocks)
        peak = best.plan.peak_bytes
        fits = peak is not None and self._trials.failed.usable is not None and peak <= self._trials.usable
        if not fits and self._may_recompute_norms:
            include: dict[str, Any] = {"include": blocks} if "include" in best.code else {}
            # "auto" takes them only where there is nothing to do without them.
            widest = "recompute" if best.plan.refused is None else "auto"
            other = self._chosen(**include, bn_dropout=widest)
            saves = other.plan.peak_bytes is not None and self._trials.saving(other.plan.peak_bytes)
            if other.plan.refused is None and saves and (peak is None or other.plan.peak_bytes < 0.99 * peak):  # type: ignore[operator]
                best = other
        return best

    @property
    def _may_recompute_norms(self) -> bool:
        """True if the model has layers that run twice only where the user allows it."""
        return any(isinstance(one, (AnyBatchNorm, AnyDropout)) for one in self._trials.failed.run.model.modules())

    def _chosen(self, **arguments: Any) -> PlanTrial:
        self._deadline.check()
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()).replace("'", '"')
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingToApplyTo)
            plan = self._planner.plan(CheckpointOptions.parse(**arguments))
        return PlanTrial(plan, f"GradientCheckpointing({given})")

    def that_fits(self) -> PlanTrial | None:
        """Return the plan with the least recomputation that fits; None if none was found.

        A memory budget counts what tensors hold, and the allocator asks the device for more. So the plan for all the
        memory that is left may not fit. Smaller budgets are then tried by bisection, down to the least peak of any
        plan. The search ends early with a plan that recomputes next to nothing.
        """
        found: PlanTrial | None = None
        bn_dropout: BnDropout = "skip"
        budget, least = self._trials.usable // MIB, self._least_budget(bn_dropout)
        too_large = budget + 1
        if self._fragmented_peak is not None:
            too_large = self._fragmented_peak // MIB
            budget = (least + too_large) // 2
        for _ in range(_BUDGET_TRIALS):
            try:
                fitting = self._fitting(budget, bn_dropout)
            except BudgetTooSmallError:
                if found is None and bn_dropout == "skip" and self._may_recompute_norms:
                    bn_dropout = "recompute"
                    least = self._least_budget(bn_dropout)
                    continue
                least = budget
            except OutOfTimeError:
                if found is None:
                    raise
                return found
            else:
                found = fitting or found
                least, too_large = (budget, too_large) if fitting else (least, budget)
            is_cheap = found is not None and found.plan.extra_operations < LEAST_PRICE
            if is_cheap or too_large - least <= max(_BUDGET_STEP * budget, 1):
                return found
            budget = (least + too_large) // 2
        return found

    @cached_property
    def _fragmented_peak(self) -> int | None:
        """The peak of the plan without a budget, if only fragmentation keeps it from fitting; else None."""
        if self._trials.failed.run.plan is not None:
            return None
        plan = self.best.plan
        if plan.refused is not None or plan.peak_bytes is None or plan.peak_bytes > self._trials.usable:
            return None
        return None if self._trials.fits(self._trials.estimate_with_plan(plan)) else plan.peak_bytes

    def with_offload(self) -> PlanTrial | None:
        """Return the plan within the memory left that may keep activations on the host; None if there is none."""
        arguments = {"memory_budget": f"{self._trials.usable // MIB}MiB", "offload": "auto"}
        try:
            return self._chosen(**arguments)
        except BudgetTooSmallError:
            return None

    def _least_budget(self, bn_dropout: BnDropout) -> int:
        """Return the least peak of any plan in MiB, as far as it is known."""
        return (self._planner.least_peak(CheckpointOptions.parse(bn_dropout=bn_dropout)) or 0) // MIB

    def _fitting(self, budget: int, bn_dropout: BnDropout) -> PlanTrial | None:
        """Return the plan for a memory budget in MiB; None if the step does not fit with it.

        Raises:
            BudgetTooSmallError: No plan is within the budget. Where it is far too small, no plan is traced to tell.
            OutOfTimeError: There is no time left.
        """
        self._deadline.check()
        options = CheckpointOptions.parse(memory_budget=f"{budget}MiB", bn_dropout=bn_dropout)
        least = self._planner.least_peak(options)
        if least is not None and least > _FAR_TOO_MUCH * budget * MIB:
            raise BudgetTooSmallError(f"The least peak of any plan is about {format_size(least)}.", least)
        plan = self._planner.plan(options)
        estimate = self._trials.estimate_with_plan(plan)
        if not self._trials.fits(estimate):
            return None
        # No plan without these layers fits, so "auto" takes this one too.
        auto = ', bn_dropout="auto"' if bn_dropout == "recompute" else ""
        return PlanTrial(plan, f'GradientCheckpointing(memory_budget="{budget}MiB"{auto})', estimate)
