"""The failed step, traced on fake tensors as it was and with something changed, and whether that would have fitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_sizes import TracedSize, largest_batch
from lightning_memtools.memory.allocator import AllocationTrace, CachingAllocator, copy_of, replay, replay_on
from lightning_memtools.memory.sizes import MIB, format_size
from lightning_memtools.oom.deadline import Deadline, OutOfTimeError
from lightning_memtools.oom.situation import Situation

_BUDGET_STEPS = 4
# A smaller share of the peak is not worth a line.
_LEAST_SAVING = 0.01


class NotFoundError(Exception):
    """There is nothing to suggest; the message says why."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits.

    Attributes:
        size: How many samples; 0 where not even one fits.
        estimate: What it needs; None where none fits.
        end: What is known of larger ones.
    """

    size: int
    estimate: MemoryEstimate | None = None
    end: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A checkpoint plan with which the step fits.

    Attributes:
        plan: The plan.
        estimate: What the step needs with it.
        budget: The memory budget that it was made for, such as "110MiB".
    """

    plan: CheckpointPlan
    estimate: MemoryEstimate
    budget: str


class Trials:
    """Traces of one failed step.

    Args:
        situation: What failed.
        deadline: When to end.

    Attributes:
        situation: What failed.
        why_not: Why the step cannot be traced; "" where it was.
    """

    def __init__(self, situation: Situation, deadline: Deadline) -> None:
        self.situation = situation
        self._deadline = deadline
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}
        self.why_not = situation.why_not_traced() or self._try_plain()

    # --- what there is

    @property
    def size(self) -> int:
        """Samples of the failed batch."""
        size = self.situation.facts.samples
        assert size is not None
        return size

    @property
    def usable(self) -> int:
        """What of the device is left for what a trace shows, in bytes."""
        usable = self.situation.usable
        assert usable is not None
        return usable

    @property
    def plain(self) -> MemoryEstimate:
        """The step as it was, where it could be traced."""
        return self.at(self.size)

    @cached_property
    def plain_fits(self) -> bool:
        """Whether the step as it was would fit: then a trace of it lacks what made it fail."""
        return self.situation.usable is not None and self.fits(self.plain)

    @property
    def can_tell_what_fits(self) -> bool:
        """Whether a trace can tell that; else only by how much something lowers the peak."""
        return self.situation.usable is not None and not self.plain_fits

    @property
    def modules(self) -> tuple[tuple[str, int], ...]:
        """Activations by module, largest first: in training those kept for backward, else those at the peak."""
        in_training = self.situation.stage == "train"
        found = (
            (module.name or "(the model)", module.saved_bytes if in_training else module.at_peak_bytes)
            for module in self.plain.modules
        )
        return tuple(sorted(found, key=lambda item: -item[1]))

    # --- whether it fits

    def at(self, size: int, accumulate: int | None = None) -> MemoryEstimate:
        """The step with another batch size, of so many batches to an optimizer step."""
        key = (size, min(accumulate or self.situation.accumulate, 2))
        if key not in self._estimates:
            self._deadline.check()
            self._estimates[key] = self.situation.estimate(size, accumulate=accumulate)
        return self._estimates[key]

    def fits(self, estimate: MemoryEstimate, *, emptied: bool = False) -> bool:
        """Whether traced steps fit: in evaluation where the cache is as training left it, else on a device of its own.

        Args:
            estimate: The traced steps.
            emptied: Whether the cache is emptied before evaluation.
        """
        if self.usable <= 0:
            return False
        self._deadline.check()
        if self._at_evaluation is None:
            return estimate.fits(f"{self.usable}B")
        allocator = copy_of(self._at_evaluation)
        if emptied:
            allocator.empty_cache()
        return estimate.fits_beside(allocator)

    def fits_if_it_tells(self, estimate: MemoryEstimate) -> bool | None:
        """The same; None where a trace cannot tell."""
        return self.fits(estimate) if self.can_tell_what_fits else None

    def plain_fits_with(self, n_bytes: int) -> bool | None:
        """Whether the step as it was would fit with so much more; None where it is not known what there is."""
        return None if self.situation.usable is None else self.plain.fits(f"{self.usable + n_bytes}B")

    @cached_property
    def largest_batch(self) -> Largest:
        """The largest batch that fits."""
        known: dict[int, bool] = {}

        def attempt(size: int) -> TracedSize:
            estimate = self.at(size)
            known[size] = self.fits(estimate)
            return TracedSize(known[size], estimate.peak_allocated, estimate.trace)

        end = "{} does not fit"
        try:
            size = largest_batch(
                self._first_guess(),
                attempt=attempt,
                serves=partial(self._serves, self.plain.begin),
                limit=self.usable,
                known={self.size: attempt(self.size)},
            )
        except OutOfTimeError:
            size = max((size for size, does in known.items() if does), default=0)
            if not size:
                raise
            end = "a larger one may fit: there was no time to find out"
        return Largest(size, self.at(size), end.format(size + 1)) if size else Largest(0)

    def auto_plan(self) -> CheckpointPlan:
        """What GradientCheckpointing() takes by itself."""
        self._deadline.check()
        return self._planner.plan(CheckpointOptions.parse())

    def plan_that_fits(self) -> Planned | None:
        """The plan of least recomputation that fits; None where there is none."""
        budget = self.usable // MIB
        for _ in range(_BUDGET_STEPS):
            self._deadline.check()
            try:
                plan = self._planner.plan(CheckpointOptions.parse(memory_budget=f"{budget}MiB"))
            except BudgetTooSmallError:
                return None
            estimate = self.situation.estimate(plan=plan)
            if self.fits(estimate):
                return Planned(plan, estimate, f"{budget}MiB")
            # It fits the budget as what tensors hold; what the allocator asks of the device is more.
            budget -= max(budget // 20, 1)
        return None

    # --- in words

    def saving(self, peak: int) -> int:
        """By how many bytes a peak is lower than the plain one; 0 where that is not worth a line."""
        saved = self.plain.peak_allocated - peak
        return saved if saved > _LEAST_SAVING * self.plain.peak_allocated else 0

    def beside(self, peak: int) -> str:
        """A peak beside what there is."""
        return f"{format_size(peak)} within {format_size(self.usable)}"

    def whether(self, peak: int, *, fits: bool | None) -> str:
        """Whether a step with that peak fits, and by how much not."""
        if fits is None:
            return f"to a peak of {format_size(peak)}; whether that is enough is not known"
        if fits:
            return f"fits, with a peak of {self.beside(peak)}"
        over = peak - self.usable
        how = f"{format_size(over)} too much" if over > 0 else f"too fragmented for {format_size(self.usable)}"
        return f"not enough by itself: a peak of {format_size(peak)}, {how}"

    # --- how it is done

    @cached_property
    def _planner(self) -> StepPlanner:
        """Plans of one step share one profile of it."""
        return StepPlanner(self.situation.step())

    def _try_plain(self) -> str:
        try:
            self.at(self.size)
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything over fake tensors
            return in_a_line(error)
        return ""

    @cached_property
    def _at_evaluation(self) -> CachingAllocator | None:
        """The allocator as training left it; None in training, and where it is not known."""
        history, began = self.situation.history, self.situation.evaluation_began
        return None if history is None or began is None else history.allocator_at(began)

    def _first_guess(self) -> int:
        """A size with which what grows with the batch fits beside what does not, by the plain step's peak."""
        at_peak = self.plain.composition
        fixed = sum(at_peak[part] for part in ("parameters", "gradients", "optimizer"))
        growing = self.plain.peak_allocated - fixed
        guess = self.size * (self.usable - fixed) // growing if growing else 1
        return max(1, min(guess, self.size - 1))

    def _serves(self, begin: int, trace: AllocationTrace) -> bool:
        """Whether what steps ask for finds memory: as `fits`, of a trace in which they begin at an event."""
        self._deadline.check()
        if self._at_evaluation is not None:
            return replay_on(copy_of(self._at_evaluation), trace, n_skipped=begin).completed
        return replay(trace, capacity=self.usable).completed


def in_a_line(error: Exception) -> str:
    """Why something could not be done."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, (OutOfTimeError, NotFoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
