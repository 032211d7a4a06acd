"""The failed step traced on fake tensors, as it was and with something changed: what it needs and whether it fits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_memtools._torch import AnyBatchNorm, AnyDropout
from lightning_memtools.checkpointing.chains import NothingToApplyTo, candidates
from lightning_memtools.checkpointing.checkpoint_options import BnDropout, CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.memory_model import Ranges
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch
from lightning_memtools.memory.allocator import AllocationTrace, CachingAllocator, copy_of, replay, replay_on
from lightning_memtools.memory.sizes import MIB, format_size
from lightning_memtools.oom.failed_step import FailedStep

_BUDGET_TRIALS = 4
# Memory budgets that are closer than this, as a share of them, are not told apart.
_BUDGET_STEP = 0.01
# As a share of the step's computation. Nothing is gained where recomputation costs even less.
LEAST_PRICE = 0.01
# As a share of the plain step's peak. Smaller savings are not worth a line.
_LEAST_SAVING = 0.01
# Peaks that are computed from a profile are within some percent of traced ones.
_FAR_TOO_MUCH = 1.25


NOT_REACHED = "the time for the checks was over"


class OutOfTimeError(Exception):
    """The time for checking is over."""


class NotFoundError(Exception):
    """There is nothing to suggest; the message says why."""


class Deadline:
    """A time by which the checks have to end, in processor time of this thread.

    So what is reached does not depend on what else the machine does. On a machine that others use, a report takes
    longer by the clock.

    Args:
        seconds: The time from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    @property
    def left_s(self) -> float:
        """The seconds that are left; below 0 when the time is over."""
        return self._end - time.thread_time()

    def check(self) -> None:
        """Return if there is time left.

        Raises:
            OutOfTimeError: There is none.
        """
        if self.left_s <= 0:
            raise OutOfTimeError(NOT_REACHED)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While entered, a step that is being traced ends at the next module it calls once the time is over."""
        handles: list[Any] = [
            register_module_forward_pre_hook(lambda *_: self.check()),
            register_optimizer_step_pre_hook(lambda *_: self.check()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        size: The number of samples; 0 where not even one fits.
        estimate: The estimate of a step with this batch; None where none fits.
        end: What is known of larger batches, in words.
    """

    size: int
    estimate: MemoryEstimate | None = None
    end: str = ""


@dataclass(frozen=True, slots=True)
class FittingPlan:
    """A checkpoint plan with which the step fits.

    Attributes:
        plan: The plan.
        estimate: The estimate of the step with the plan.
        code: The callback that makes it.
    """

    plan: CheckpointPlan
    estimate: MemoryEstimate
    code: str


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A checkpoint plan without a budget.

    Attributes:
        plan: The plan.
        code: The callback that makes it.
    """

    plan: CheckpointPlan
    code: str


class StepTrials:
    """Traces of one failed step.

    Args:
        failed: The failed step.
        deadline: The time by which to end.

    Attributes:
        failed: The failed step.
        why_not: The reason why the step cannot be traced; "" where it was traced.
    """

    def __init__(self, failed: FailedStep, deadline: Deadline) -> None:
        self.failed = failed
        self._deadline = deadline
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}
        self._under: dict[tuple[tuple[str, Ranges], ...], MemoryEstimate] = {}
        self.why_not = failed.why_not_traced() or self._try_plain()

    def _try_plain(self) -> str:
        try:
            self.at(self.size)
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything on fake tensors
            return in_a_line(error)
        return ""

    # --- the step and the device

    @property
    def size(self) -> int:
        """The number of samples in the failed batch."""
        size = self.failed.facts.samples
        assert size is not None
        return size

    @property
    def usable(self) -> int:
        """The bytes of the device that are left for what a trace shows."""
        usable = self.failed.usable
        assert usable is not None
        return usable

    @property
    def plain(self) -> MemoryEstimate:
        """The estimate of the step as it was; only where it could be traced."""
        return self.at(self.size)

    @cached_property
    def plain_fits(self) -> bool:
        """True if the step as it was fits by its trace, which then lacks what made the step fail."""
        return self.failed.usable is not None and self.fits(self.plain)

    @property
    def can_tell_what_fits(self) -> bool:
        """True if a trace can tell what fits; if not, it only tells by how much something lowers the peak."""
        return self.failed.usable is not None and not self.plain_fits

    @property
    def modules(self) -> tuple[tuple[str, int], ...]:
        """Activations by module, largest first: in training those kept for backward, else those at the peak."""
        in_training = self.failed.stage == "train"
        found = (
            (module.name or "(the model)", module.saved_bytes if in_training else module.at_peak_bytes)
            for module in self.plain.modules
        )
        return tuple(sorted(found, key=lambda item: -item[1]))

    # --- what fits

    def at(self, size: int, accumulate: int | None = None) -> MemoryEstimate:
        """Return the estimate of the step with another batch size and number of batches per optimizer step."""
        key = (size, min(accumulate or self.failed.run.accumulate, 2))
        if key not in self._estimates:
            self._deadline.check()
            self._estimates[key] = self.failed.estimate(size, accumulate=accumulate)
        return self._estimates[key]

    def under(self, plan: CheckpointPlan) -> MemoryEstimate:
        """Return the estimate of the step with a checkpoint plan."""
        key = tuple((chain.name, chain.ranges) for chain in plan.chains)
        if key not in self._under:
            self._deadline.check()
            self._under[key] = self.failed.estimate(plan=plan)
        return self._under[key]

    @cached_property
    def smallest_batch(self) -> int | None:
        """The smallest batch with which the step can be traced: BatchNorm refuses to train on one sample."""
        for size in (1, 2):
            try:
                self.at(size)
            except ValueError:
                continue
            return size
        return None

    def fits(self, estimate: MemoryEstimate, *, emptied: bool = False) -> bool:
        """Return whether traced steps fit: in evaluation into the cache as training left it, else into an empty device.

        Args:
            estimate: The estimate of the steps.
            emptied: True if the cache is emptied before evaluation.
        """
        # What never asks the device for more than is left needs no replay.
        if self._at_evaluation is None and estimate.peak_reserved <= self.usable:
            return True
        return estimate.trace is not None and self._serves(estimate.trace, estimate.begin, emptied=emptied)

    def _serves(self, trace: AllocationTrace, begin: int, *, emptied: bool = False) -> bool:
        """Return whether all requests of a trace find memory.

        Args:
            trace: The trace of the steps.
            begin: The number of its first events that put the model onto the device.
            emptied: True if the cache is emptied before evaluation.
        """
        if self.usable <= 0:
            return False
        self._deadline.check()
        if self._at_evaluation is None:
            return replay(trace, capacity=self.usable).completed
        allocator = copy_of(self._at_evaluation)
        if emptied:
            allocator.empty_cache()
        return replay_on(allocator, trace, n_skipped=begin).completed

    @cached_property
    def _at_evaluation(self) -> CachingAllocator | None:
        """The allocator as training left it; None in training, and where it is not known."""
        history, began = self.failed.history, self.failed.evaluation_began
        return None if history is None or began is None else history.allocator_at(began)

    def fits_if_known(self, estimate: MemoryEstimate) -> bool | None:
        """Return whether traced steps fit; None where a trace cannot tell."""
        return self.fits(estimate) if self.can_tell_what_fits else None

    def plain_fits_with(self, n_bytes: int) -> bool | None:
        """Return whether the step as it was fits with `n_bytes` more memory; None where the capacity is not known."""
        return None if self.failed.usable is None else self.plain.fits(f"{self.usable + n_bytes}B")

    @cached_property
    def largest_batch(self) -> LargestBatch:
        """The largest batch that fits."""
        known: dict[int, bool] = {}

        def attempt(size: int) -> TracedSize:
            estimate = self.at(size)
            known[size] = self.fits(estimate)
            return TracedSize(known[size], estimate.peak_allocated, estimate.trace)

        # Segments of the allocator make a step's fit jump: it need not end for good where it ends first.
        end = "A batch of {} does not fit, but slightly larger ones may"
        try:
            size = largest_batch(
                self._first_guess(),
                attempt=attempt,
                serves=lambda trace: self._serves(trace, self.plain.begin),
                limit=self.usable,
                known={self.size: attempt(self.size)},
            )
        except OutOfTimeError:
            size = max((size for size, does in known.items() if does), default=0)
            if not size:
                raise
            end = "A larger batch may fit too: there was no time to find out"
        return LargestBatch(size, self.at(size), end.format(size + 1)) if size else LargestBatch(0)

    def _first_guess(self) -> int:
        """Return a batch size that fits if what the plain step holds at its peak grows with the batch or is fixed."""
        at_peak = self.plain.composition
        fixed = sum(at_peak[part] for part in ("parameters", "gradients", "optimizer"))
        growing = self.plain.peak_allocated - fixed
        guess = self.size * (self.usable - fixed) // growing if growing else 1
        return max(1, min(guess, self.size - 1))

    # --- checkpoint plans

    @cached_property
    def _planner(self) -> StepPlanner:
        """Plans of one step share one profile of it."""
        return StepPlanner(self.failed.step())

    @cached_property
    def best_plan(self) -> ChosenPlan:
        """The plan that GradientCheckpointing chooses by itself, or one of its other settings where that lowers more.

        Repeated blocks that are in no Sequential are taken where it finds nothing by itself; BatchNorm and Dropout are
        recomputed where the step does not fit otherwise.
        """
        best = self._chosen()
        blocks = candidates(self.failed.run.model)
        if best.plan.plain is None and blocks:
            best = self._chosen(include=blocks)
        peak = best.plan.peak_bytes
        fits = peak is not None and self.failed.usable is not None and peak <= self.usable
        if not fits and self._may_recompute_norms:
            include: dict[str, Any] = {"include": blocks} if "include" in best.code else {}
            # "auto" takes them only where there is nothing to do without them.
            widest = "recompute" if best.plan.refused is None else "auto"
            other = self._chosen(**include, bn_dropout=widest)
            saves = other.plan.peak_bytes is not None and self.saving(other.plan.peak_bytes)
            if other.plan.refused is None and saves and (peak is None or other.plan.peak_bytes < 0.99 * peak):  # type: ignore[operator]
                best = other
        return best

    @property
    def _may_recompute_norms(self) -> bool:
        """True if the model has layers that run twice only where the user allows it."""
        return any(isinstance(one, (AnyBatchNorm, AnyDropout)) for one in self.failed.run.model.modules())

    def _chosen(self, **arguments: Any) -> ChosenPlan:
        self._deadline.check()
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items()).replace("'", '"')
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingToApplyTo)
            plan = self._planner.plan(CheckpointOptions.parse(**arguments))
        return ChosenPlan(plan, f"GradientCheckpointing({given})")

    def plan_that_fits(self) -> FittingPlan | None:
        """Return the plan with the least recomputation that was found to fit; None where none was.

        A memory budget counts what tensors hold, and the allocator asks the device for more. So the plan for all the
        memory that is left may not fit. Smaller budgets are then tried by bisection, down to the least peak of any
        plan. The search ends early with a plan that recomputes next to nothing.
        """
        found: FittingPlan | None = None
        bn_dropout: BnDropout = "skip"
        budget, least = self.usable // MIB, self._least_budget(bn_dropout)
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
        """The peak of the plan without a budget if only fragmentation keeps it from fitting, else None."""
        if self.failed.run.plan is not None:
            return None
        plan = self.best_plan.plan
        if plan.refused is not None or plan.peak_bytes is None or plan.peak_bytes > self.usable:
            return None
        return None if self.fits(self.under(plan)) else plan.peak_bytes

    def _least_budget(self, bn_dropout: BnDropout) -> int:
        """Return the least peak of any plan in MiB, as far as it is known."""
        return (self._planner.least_peak(CheckpointOptions.parse(bn_dropout=bn_dropout)) or 0) // MIB

    def _fitting(self, budget: int, bn_dropout: BnDropout) -> FittingPlan | None:
        """Return the plan for a memory budget in MiB; None if the step does not fit with it.

        Raises:
            BudgetTooSmallError: No plan is within the budget.
            OutOfTimeError: There is no time left.
        """
        self._deadline.check()
        plan = self._plan_within(CheckpointOptions.parse(memory_budget=f"{budget}MiB", bn_dropout=bn_dropout))
        estimate = self.under(plan)
        if not self.fits(estimate):
            return None
        # No plan without these layers fits, so "auto" takes this one too.
        auto = ', bn_dropout="auto"' if bn_dropout == "recompute" else ""
        return FittingPlan(plan, estimate, f'GradientCheckpointing(memory_budget="{budget}MiB"{auto})')

    def _plan_within(self, options: CheckpointOptions) -> CheckpointPlan:
        """Return the plan for a budget.

        Raises:
            BudgetTooSmallError: No plan is within it. Where it is surely far too small, no plan is traced to tell.
        """
        least = self._planner.least_peak(options)
        if least is not None and options.budget_bytes is not None and least > _FAR_TOO_MUCH * options.budget_bytes:
            raise BudgetTooSmallError(f"The least peak of any plan is about {format_size(least)}.", least)
        return self._planner.plan(options)

    # --- in words

    def saving(self, peak: int) -> int:
        """Return by how many bytes a peak is lower than the plain one; 0 where that is not worth a line."""
        saved = self.plain.peak_allocated - peak
        return saved if saved > _LEAST_SAVING * self.plain.peak_allocated else 0

    def within(self, peak: int) -> str:
        """Return a peak and what it has to fit into."""
        return f"{format_size(peak)} within the available {format_size(self.usable)}"

    def verdict(self, peak: int, *, fits: bool | None, price: str = "", alone: str = "by itself") -> str:
        """Say in sentences how much lower a changed step's peak is, and whether the step fits.

        Args:
            peak: The peak.
            fits: Whether the step fits; None where that is not known.
            price: What the change costs; "" where it is not said.
            alone: The words for the change, or the changes, that are not enough.
        """
        saved = self.saving(peak)
        falls = (
            f"he peak falls by {format_size(saved)} to {format_size(peak)}"
            if saved
            else f"he peak is {format_size(peak)}"
        )
        sentence = f"With {price}, t{falls}" if price else f"T{falls}"
        if fits is None:
            return f"{sentence}. Whether that is enough is not known"
        if fits:
            return f"{sentence} and fits within the available {format_size(self.usable)}"
        return f"{sentence}. That is not enough {alone}: {self.obstacle(peak)}"

    def obstacle(self, peak: int) -> str:
        """Say why a step with that peak does not fit."""
        over, usable = peak - self.usable, format_size(self.usable)
        if over > 0:
            return f"it is {format_size(over)} more than the available {usable}"
        return f"its tensors would fit within the available {usable}, but fragmentation prevents it"


def in_a_line(error: Exception) -> str:
    """Return in one line why something could not be done."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, (OutOfTimeError, NotFoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
