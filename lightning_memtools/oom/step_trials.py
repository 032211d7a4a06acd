"""The failed step traced on fake tensors, as it was and with something changed: what it needs and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch
from lightning_memtools.memory.allocator import AllocationTrace, CachingAllocator, copy_of, replay, replay_on
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.deadline import Deadline, OutOfTimeError
from lightning_memtools.oom.failed_step import FailedStep
from lightning_memtools.oom.plan_trials import PlanTrials

# As a share of the plain step's peak. Smaller savings are not worth a line.
_LEAST_SAVING = 0.01


class NotFoundError(Exception):
    """There is nothing to suggest; the message says why."""


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


class StepTrials:
    """Traces a failed step with changes, and compares the peaks.

    Args:
        failed: The failed step.
        deadline: The time by which to end.

    Attributes:
        failed: The failed step.
        plans: Checkpoint plans of it.
        why_not: The reason why the step cannot be traced; "" where it was traced.
    """

    def __init__(self, failed: FailedStep, deadline: Deadline) -> None:
        self.failed = failed
        self._deadline = deadline
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}
        self._with_plans: dict[tuple[Any, ...], MemoryEstimate] = {}
        self.plans = PlanTrials(self, deadline)
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
    def missing(self) -> int:
        """The bytes by which the step is too large; 0 where a trace cannot tell."""
        return max(0, self.plain.peak_allocated - self.usable) if self.can_tell_what_fits else 0

    @property
    def plain(self) -> MemoryEstimate:
        """The estimate of the step as it was; only where it could be traced."""
        return self.at(self.size)

    @cached_property
    def plain_fits(self) -> bool:
        """True if the trace of the unchanged step fits: it then lacks what made the step fail."""
        return self.failed.usable is not None and self.fits(self.plain)

    @property
    def can_tell_what_fits(self) -> bool:
        """True if a trace can tell what fits; if not, it only tells by how much something lowers the peak."""
        return self.failed.usable is not None and not self.plain_fits

    def check_time(self) -> None:
        """Raise where the time is over."""
        self._deadline.check()

    # --- what fits

    def at(self, size: int, accumulate: int | None = None) -> MemoryEstimate:
        """Return the estimate of the step with another batch size and number of batches per optimizer step."""
        key = (size, min(accumulate or self.failed.run.accumulate, 2))
        if key not in self._estimates:
            self._deadline.check()
            self._estimates[key] = self.failed.estimate(size, accumulate=accumulate)
        return self._estimates[key]

    def estimate_with_plan(self, plan: CheckpointPlan) -> MemoryEstimate:
        """Return the estimate of the step with a checkpoint plan."""
        key = plan.heads, *((chain.name, chain.ranges, chain.offloaded) for chain in plan.chains)
        if key not in self._with_plans:
            self._deadline.check()
            self._with_plans[key] = self.failed.estimate(plan=plan)
        return self._with_plans[key]

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
        # A first guess that fits if what the plain step holds at its peak grows with the batch or is fixed.
        at_peak = self.plain.composition
        fixed = sum(at_peak[part] for part in ("parameters", "gradients", "optimizer"))
        growing = self.plain.peak_allocated - fixed
        guess = self.size * (self.usable - fixed) // growing if growing else 1
        known: dict[int, bool] = {}

        def attempt(size: int) -> TracedSize:
            estimate = self.at(size)
            known[size] = self.fits(estimate)
            return TracedSize(known[size], estimate.peak_allocated, estimate.trace)

        end = ""
        try:
            size = largest_batch(
                max(1, min(guess, self.size - 1)),
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
        return LargestBatch(size, self.at(size), end or self._why_not_larger(size + 1)) if size else LargestBatch(0)

    def _why_not_larger(self, size: int) -> str:
        """Say why a batch does not fit: for its tensors, or for the segments that the allocator reserves for them."""
        peak = self.at(size).peak_allocated
        if peak > self.usable:
            return f"A batch of {size} does not fit: its tensors alone take {format_size(peak)}"
        # Segments make a step's fit jump: it need not end for good where it ends first.
        return (
            f"A batch of {size} does not fit in a replay of the allocator. Its tensors, {format_size(peak)}, would: "
            "this rests on how memory is cut into segments, so that slightly larger batches may fit"
        )

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
    """Return an error's message in one line."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, (OutOfTimeError, NotFoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
