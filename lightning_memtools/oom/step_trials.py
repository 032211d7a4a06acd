"""Traces the failed step on fake tensors, unchanged and with changes, and tells whether it fits."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch
from lightning_memtools.memory.allocator import AllocationTrace, CachingAllocator, copy_of, replay, replay_on
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.oom.failed_step import FailedStep

# As a share of the plain step's peak. Smaller savings are not worth a line.
_LEAST_SAVING = 0.01


class NotCheckedError(Exception):
    """Raised if a suggested change cannot be tried. The message says why."""


class StepTrials:
    """Traces a failed step with different changes, and compares their peaks with that of the unchanged step.

    The time limit is checked before each trial; a trial that has begun runs to its end. The limit is in CPU time of
    this thread, so that the result does not depend on the load of the machine.

    Args:
        failed: The failed step.
        seconds: The CPU time, counted from now on, during which trials may begin.

    Attributes:
        failed: The failed step.
        why_not: The reason why the step cannot be traced; "" if it was traced.
    """

    def __init__(self, failed: FailedStep, seconds: float) -> None:
        self.failed = failed
        self._end = time.thread_time() + seconds
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}
        self.why_not = failed.why_not_traced()
        if not self.why_not:
            try:
                self.at(self.size)
            except Exception as error:  # noqa: BLE001, the user's own step may raise anything on fake tensors
                self.why_not = why_not_checked(error)

    def check_time(self) -> None:
        """Check that there is time for another trial.

        Raises:
            NotCheckedError: The time is used up.
        """
        if time.thread_time() >= self._end:
            raise NotCheckedError("the time for the checks was over")

    # --- what the step needs

    @property
    def size(self) -> int:
        """The number of samples in the failed batch."""
        size = self.failed.facts.samples
        assert size is not None
        return size

    @property
    def plain(self) -> MemoryEstimate:
        """The memory estimate for the unchanged step. Fails if the step cannot be traced."""
        return self.at(self.size)

    @cached_property
    def planner(self) -> StepPlanner:
        """Makes checkpoint plans for the step. The step is profiled once, for all plans."""
        return StepPlanner(self.failed.request(self.failed.facts.batch))

    def at(self, size: int, accumulate: int | None = None) -> MemoryEstimate:
        """Return the memory estimate for batches of `size` samples, with `accumulate` batches per optimizer step."""
        key = (size, min(accumulate or self.failed.run.accumulate, 2))
        if key not in self._estimates:
            self.check_time()
            self._estimates[key] = self.failed.estimate(size, accumulate=accumulate)
        return self._estimates[key]

    def having(self, **changes: Any) -> MemoryEstimate:
        """Return the memory estimate for a changed step. `changes` are arguments of `FailedStep.estimate`."""
        self.check_time()
        return self.failed.estimate(**changes)

    def saving(self, peak: int) -> int:
        """Return by how many bytes `peak` is below the peak of the unchanged step; 0 if that is negligible."""
        saved = self.plain.peak_allocated - peak
        return saved if saved > _LEAST_SAVING * self.plain.peak_allocated else 0

    # --- whether it fits

    @cached_property
    def plain_fits(self) -> bool:
        """True if the unchanged step fits in simulation. The real step then failed for a reason that no trace shows."""
        return self.failed.usable is not None and self._serves(self.plain.trace)

    @property
    def limit(self) -> int | None:
        """The bytes available to the step's tensors; None if unknown, or if the unchanged step fits in simulation."""
        return None if self.plain_fits else self.failed.usable

    def fits(self, estimate: MemoryEstimate) -> bool | None:
        """Return whether a step with this estimate fits in the available memory; None if simulation cannot tell."""
        return None if self.limit is None else self._serves(estimate.trace)

    def fits_with(self, n_bytes: int) -> bool | None:
        """Return whether the unchanged step fits if `n_bytes` are freed; None if simulation cannot tell."""
        return None if self.why_not or self.limit is None else self.plain.fits(f"{self.limit + n_bytes}B")

    def _serves(self, trace: AllocationTrace) -> bool:
        """Return True if a traced step fits. In evaluation, the replay starts with the memory state after training."""
        usable, left = self.failed.usable or 0, self._at_evaluation
        if usable <= 0 or not replay(trace, capacity=usable).completed:
            return False
        return left is None or replay_on(copy_of(left), trace, n_skipped=self.plain.begin).completed

    @cached_property
    def _at_evaluation(self) -> CachingAllocator | None:
        """The simulated allocator at the moment when evaluation began; None in training or if unknown."""
        history, began = self.failed.history, self.failed.evaluation_began
        return None if history is None or began is None else history.allocator_at(began)

    @cached_property
    def largest_batch(self) -> int:
        """The largest batch size that fits; 0 if not even one sample does."""
        assert self.limit is not None

        def attempt(size: int) -> TracedSize:
            estimate = self.at(size)
            return TracedSize(self._serves(estimate.trace), estimate.peak_allocated, estimate.trace)

        def serves(trace: AllocationTrace) -> bool:
            self.check_time()
            return self._serves(trace)

        known = {self.size: attempt(self.size)}
        return largest_batch(max(1, self.size // 2), attempt=attempt, serves=serves, limit=self.limit, known=known)


def why_not_checked(error: Exception) -> str:
    """Return the reason why a change was not checked: the error's message in one line, without the final period."""
    return (str(error) if isinstance(error, NotCheckedError) else in_one_line(error)).rstrip(".")
