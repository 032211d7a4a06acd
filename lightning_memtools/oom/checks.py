"""Tries what could be done about a failed step: on fake tensors, or by replaying the recorded history."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memtools.checkpointing.options import Options
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, CheckpointPlan, make_plan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_size import Trial, largest_batch
from lightning_memtools.estimate.continuing import run_on
from lightning_memtools.estimate.limits import Limit
from lightning_memtools.memory.allocator import Trace, replay
from lightning_memtools.memory.capacity import known_gpus
from lightning_memtools.memory.sizes import MIB, format_size
from lightning_memtools.oom.actions import Action, Kind, ranked
from lightning_memtools.oom.deadline import Deadline, OutOfTimeError
from lightning_memtools.oom.fragmentation import Verdict, with_empty_cache, with_expandable_segments, with_more_memory
from lightning_memtools.oom.situation import Situation

Check = Callable[[], Iterator[Action]]

_GROW = "Let segments grow"
_CONF = 'PYTORCH_ALLOC_CONF="expandable_segments:True"'
_EMPTY = "Empty the cache before evaluation"
_BUDGET_STEPS = 4
# A smaller share of the peak is not worth a line.
_LEAST_SAVING = 0.01
_LOADERS = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}


class Checks:
    """All checks of one report, those that are reached in time.

    Args:
        situation: What failed.
        deadline: When to end.

    Attributes:
        request: What the program asked for, in bytes, as the recorded history has it; None where there is none.
        expandable: Whether expandable segments would have served the request; None where no history was recorded.
        plain: The estimate of the step as it was; None where it could not be traced.
        actions: What was found, in the order of their worth.
        modules: Activations that the traced step keeps, by module, largest first.
        notes: What else is to be known.
    """

    def __init__(self, situation: Situation, deadline: Deadline) -> None:
        self.request: int | None = None
        self.expandable: Verdict | None = None
        self.plain: MemoryEstimate | None = None
        self.actions: list[Action] = []
        self.modules: tuple[tuple[str, int], ...] = ()
        self.notes: list[str] = []
        self._situation = situation
        self._deadline = deadline
        self._why_not = ""
        self._largest: _Largest | None = None
        history, began = situation.history, situation.evaluation_began
        # What evaluation finds: the cache as training left it.
        self._until_evaluation = None if history is None or began is None else history.trace_until(began)
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}

    def run(self) -> None:
        """Do them: what takes little time first, then what helps most."""
        situation = self._situation
        found: list[Action] = []
        # Advice that the step gives while it is traced was given while it ran.
        with warnings.catch_warnings(), self._deadline.interrupting():
            warnings.simplefilter("ignore")
            if situation.history is not None:
                failed = situation.history.failure()
                self.request = None if failed is None else failed.n_bytes
                self.expandable = with_expandable_segments(situation.history)
            self._why_not = situation.why_not_traced() or self._trace_plain()
            for check, unchecked in self._planned():
                needs_trace = check not in {self._expandable_segments, self._empty_cache}
                found += _carried_out(check, unchecked, self._why_not if needs_trace else "")
        self.actions = ranked(found)

    def _planned(self) -> list[tuple[Check, Action]]:
        """What to check, and what to say of it where it cannot be carried out."""
        situation = self._situation
        checks: list[tuple[Check, Action]] = []

        def plan(check: Check, kind: Kind, title: str, code: str = "") -> None:
            checks.append((check, Action(kind=kind, title=title, code=code)))

        training = situation.stage == "train"
        if not situation.config.expandable_segments:
            plan(self._expandable_segments, Kind.EXPANDABLE_SEGMENTS, _GROW, _CONF)
        if situation.evaluation_began is not None and not situation.empties_cache:
            plan(self._empty_cache, Kind.EMPTY_CACHE, _EMPTY, "EmptyCache()")
        if situation.processes:
            plan(self._processes, Kind.STOP_PROCESS, "Stop other processes on the device")
        if situation.stage == "predict" and situation.predictions:
            plan(self._predictions, Kind.PREDICTIONS, "Keep no predictions on the device")
        plan(self._larger_gpu, Kind.LARGER_GPU, "Use a larger GPU")
        plan(self._batch_size, Kind.BATCH_SIZE, "Use smaller batches")
        if training:
            plan(self._checkpointing, Kind.CHECKPOINTING, "Recompute activations", "GradientCheckpointing()")
            plan(self._accumulation, Kind.ACCUMULATION, "Accumulate gradients over smaller batches",
                 "Trainer(accumulate_grad_batches=...)")  # fmt: skip
        if situation.precision == "32-true":
            plan(self._precision, Kind.PRECISION, "Compute in bfloat16", _trainer("bf16-mixed"))
        if training:
            plan(self._optimizer, Kind.OPTIMIZER, "Use an optimizer with a smaller state")
        return checks

    # --- replays of what was recorded

    def _expandable_segments(self) -> Iterator[Action]:
        if self.expandable is None or self.expandable.served is None:
            raise NotFoundError("no history was recorded" if self.expandable is None else self.expandable.why)
        config = replace(self._situation.config, expandable_segments=True)

        def whole_step() -> tuple[MemoryEstimate, bool]:
            plain = self.plain
            assert plain is not None
            assert plain.trace is not None
            return plain, replay(plain.trace, config=config, capacity=self._usable).completed

        yield self._of_verdict(self.expandable, Kind.EXPANDABLE_SEGMENTS, _GROW, _CONF, whole_step)

    def _empty_cache(self) -> Iterator[Action]:
        history, evaluation = self._situation.history, self._situation.evaluation_began
        if history is None or evaluation is None:
            raise NotFoundError("no history was recorded")
        verdict = with_empty_cache(history, evaluation)
        if verdict.served is None:
            raise NotFoundError(verdict.why)

        def whole_step() -> tuple[MemoryEstimate, bool]:
            estimate = self._at(self._size)
            return estimate, self._fits(estimate, emptied=True)

        yield self._of_verdict(verdict, Kind.EMPTY_CACHE, _EMPTY, "EmptyCache()", whole_step)

    def _of_verdict(
        self, verdict: Verdict, kind: Kind, title: str, code: str, whole_step: Callable[[], tuple[MemoryEstimate, bool]]
    ) -> Action:
        """One request was replayed; whether the rest of the step fits, a trace tells."""
        detail, fits = f"{verdict.why}, as a replay of the recorded history shows", verdict.served
        if verdict.served and not self._why_not:
            estimate, fits = whole_step()
            detail += (
                f"; for the whole step that is {self._whether(estimate, fits=fits)}"
                if not fits
                else (f"; the whole step fits, with a peak of {self._peak(estimate)}")
            )
        elif verdict.served:
            detail += "; whether the rest of the step would fit is not known"
            fits = None
        return Action(
            kind=kind, title=title, code=code, detail=detail, checked=True, fits=fits, saved=int(fits is None)
        )

    # --- traces

    def _trace_plain(self) -> str:
        """Trace the step as it was; why nothing can be traced, where that fails."""
        try:
            self.plain = self._at(self._size)
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything over fake tensors
            return _in_a_line(error)
        self.modules = tuple(
            sorted(
                ((module.name or "(the model)", module.saved_bytes) for module in self.plain.modules),
                key=lambda item: -item[1],
            )
        )
        if self._fits(self.plain):
            self.notes.append(
                f"Traced by itself, this step fits: its peak is {format_size(self.plain.peak_allocated)} of "
                f"{format_size(self._usable)}. So what failed is how the memory lay, or something that the trace does "
                "not show, such as what a hook or a callback makes."
            )
        self.notes += self.plain.notes
        return ""

    def _batch_size(self) -> Iterator[Action]:
        size, found = self._size, self._largest_batch()
        if found.size >= size:
            return
        if found.estimate is None:
            yield Action(
                kind=Kind.BATCH_SIZE, title="Use smaller batches", checked=True, fits=False,
                detail="not even one sample fits",
            )  # fmt: skip
            return
        yield Action(
            kind=Kind.BATCH_SIZE,
            title=f"Use {_LOADERS[self._situation.stage or 'train']} batches of {found.size} in place of {size}",
            detail=f"fits, with a peak of {self._peak(found.estimate)}; {found.end}",
            checked=True,
            fits=True,
            saved=self._saving(found.estimate),
            code=f"DataLoader(batch_size={found.size})",
        )

    def _checkpointing(self) -> Iterator[Action]:
        plan, budget = self._plan()
        assert plan.plain is not None
        if plan.refused is not None:
            yield Action(kind=Kind.CHECKPOINTING, title="Recompute activations", detail=plan.refused.rstrip("."),
                         checked=True, fits=False)  # fmt: skip
            return
        names = ", ".join(f"`{chain.name or '(the model)'}`" for chain in plan.chains if chain.ranges)
        estimate = self._situation.estimate(plan=plan)
        fits = self._fits(estimate)
        extra = plan.extra_operations
        price = f"{extra:.0%} more computation" if extra >= 0.01 else "less than 1% more computation"  # noqa: PLR2004
        yield Action(
            kind=Kind.CHECKPOINTING,
            title=f"Recompute activations of {names}",
            detail=f"{self._minus(estimate)} at {price}, {self._whether(estimate, fits=fits)}",
            checked=True,
            fits=fits,
            saved=self._saving(estimate),
            code="GradientCheckpointing()" if budget is None else f'GradientCheckpointing(memory_budget="{budget}")',
        )

    def _accumulation(self) -> Iterator[Action]:
        size, accumulate = self._size, self._situation.accumulate
        effective = size * accumulate
        for smaller in range(min(self._largest_batch().size, size - 1), 0, -1):
            if effective % smaller:
                continue
            estimate = self._at(smaller, effective // smaller)
            if self._fits(estimate):
                yield Action(
                    kind=Kind.ACCUMULATION,
                    title=f"Accumulate gradients over {effective // smaller} batches of {smaller}",
                    detail=f"keeps the effective batch of {effective} and fits, with a peak of {self._peak(estimate)}",
                    checked=True,
                    fits=True,
                    saved=self._saving(estimate),
                    code=f"DataLoader(batch_size={smaller}), Trainer(accumulate_grad_batches={effective // smaller})",
                )
                return

    def _precision(self) -> Iterator[Action]:
        estimate = self._situation.estimate(precision="bf16-mixed")
        yield self._compared(estimate, Kind.PRECISION, "Compute in bfloat16", _trainer("bf16-mixed"))

    def _optimizer(self) -> Iterator[Action]:
        optimizers = self._situation.optimizers
        if len(optimizers) != 1 or isinstance(optimizers[0], torch.optim.SGD):
            return
        # Adafactor's state is smaller still, but its step reads values, which a trace does not have.
        estimate = self._situation.estimate(optimizer=lambda own: torch.optim.SGD(own, lr=1e-3, momentum=0.9))
        title = f"Use an optimizer with a smaller state than {type(optimizers[0]).__name__}'s"
        yield self._compared(estimate, Kind.OPTIMIZER, title, "torch.optim.SGD(parameters, momentum=0.9, ...)")

    def _processes(self) -> Iterator[Action]:
        processes = self._situation.processes
        if isinstance(processes, str):
            raise NotFoundError(f"they are {processes}")
        for process in processes or ():
            if process.used_bytes:
                title = f"Stop {process.name or 'process'} (pid {process.pid})"
                yield self._more_memory(Kind.STOP_PROCESS, title, process.used_bytes, "it holds")

    def _predictions(self) -> Iterator[Action]:
        held, code = self._situation.predictions, "trainer.predict(return_predictions=False)"
        yield self._more_memory(Kind.PREDICTIONS, "Keep no predictions on the device", held, "they hold", code)

    def _larger_gpu(self) -> Iterator[Action]:
        assert self.plain is not None
        beside = self._situation.untraced
        for gpu in sorted(known_gpus(), key=lambda gpu: gpu.usable_bytes):
            usable = Limit.parse(gpu.name).usable - beside
            if usable > self._usable and self.plain.peak_allocated <= usable and self.plain.fits(f"{usable}B"):
                yield Action(
                    kind=Kind.LARGER_GPU,
                    title=f"Use a larger GPU ({gpu.name})",
                    detail="the smallest of those known on which this step fits as it is",
                    checked=True,
                    fits=True,
                )
                return

    # --- what they share

    @property
    def _size(self) -> int:
        size = self._situation.facts.samples
        assert size is not None
        return size

    @property
    def _usable(self) -> int:
        usable = self._situation.usable
        assert usable is not None
        return usable

    def _at(self, size: int, accumulate: int | None = None) -> MemoryEstimate:
        key = (size, min(accumulate or self._situation.accumulate, 2))
        if key not in self._estimates:
            self._deadline.check()
            self._estimates[key] = self._situation.estimate(size, accumulate=accumulate)
        return self._estimates[key]

    def _fits(self, estimate: MemoryEstimate, *, emptied: bool = False) -> bool:
        """Whether traced steps fit: in evaluation where the cache is as training left it, else on a device of its own.

        Args:
            estimate: The traced steps.
            emptied: Whether the cache is emptied before evaluation.
        """
        if self._usable <= 0:
            return False
        self._deadline.check()
        if self._until_evaluation is not None:
            state = replay(self._until_evaluation)
            if state.completed:
                if emptied:
                    state.allocator.empty_cache()
                return estimate.fits_beside(state.allocator)
        return estimate.fits(f"{self._usable}B")

    def _serves(self, begin: int, trace: Trace) -> bool:
        """Whether what steps ask for finds memory: as `_fits`, of a trace in which they begin at an event."""
        self._deadline.check()
        if self._until_evaluation is not None:
            state = replay(self._until_evaluation)
            if state.completed:
                return run_on(state.allocator, trace, begin)
        return replay(trace, capacity=self._usable).completed

    def _largest_batch(self) -> _Largest:
        if self._largest is None:
            self._largest = self._find_largest_batch()
        return self._largest

    def _find_largest_batch(self) -> _Largest:
        known: dict[int, bool] = {}

        def attempt(size: int) -> Trial:
            estimate = self._at(size)
            known[size] = self._fits(estimate)
            return Trial(known[size], estimate.peak_allocated, estimate.trace)

        end = "{} does not fit"
        try:
            serves = functools.partial(self._serves, self._at(self._size).begin)
            size = largest_batch(self._size, attempt=attempt, serves=serves, limit=self._usable)
        except OutOfTimeError:
            size = max((size for size, does in known.items() if does), default=0)
            if not size:
                raise
            end = "a larger one may fit: there was no time to find out"
        return _Largest(size, self._at(size), end.format(size + 1)) if size else _Largest(0)

    def _plan(self) -> tuple[CheckpointPlan, str | None]:
        """The plan of least recomputation that fits and its budget, or where none does, what "auto" takes."""
        step = self._situation.step()
        budget = self._usable // MIB
        for _ in range(_BUDGET_STEPS):
            self._deadline.check()
            try:
                plan = make_plan(step, Options.parse(memory_budget=f"{budget}MiB"))
            except BudgetTooSmallError:
                break
            if plan.refused is not None or self._fits(self._situation.estimate(plan=plan)):
                return plan, f"{budget}MiB"
            # It fits the budget as what tensors hold; what the allocator asks of the device is more.
            budget -= max(budget // 20, 1)
        self._deadline.check()
        return make_plan(step, Options.parse()), None

    def _more_memory(self, kind: Kind, title: str, n_bytes: int, verb: str, code: str = "") -> Action:
        assert self.plain is not None
        fits = self.plain.fits(f"{self._usable + n_bytes}B")
        history = self._situation.history
        if not fits and history is not None:
            fits = bool(with_more_memory(history, n_bytes).served)
        detail = f"{verb} {format_size(n_bytes)}, {'which is enough' if fits else 'which is not enough by itself'}"
        return Action(kind=kind, title=title, detail=detail, checked=True, fits=fits, saved=n_bytes, code=code)

    def _compared(self, estimate: MemoryEstimate, kind: Kind, title: str, code: str) -> Action:
        saved = self._saving(estimate)
        if not saved:
            return Action(kind=kind, title=title, detail="no lower peak", checked=True, fits=False, code=code)
        fits = self._fits(estimate)
        detail = f"{self._minus(estimate)}, {self._whether(estimate, fits=fits)}"
        return Action(kind=kind, title=title, detail=detail, checked=True, fits=fits, saved=saved, code=code)

    def _saving(self, estimate: MemoryEstimate) -> int:
        assert self.plain is not None
        saved = self.plain.peak_allocated - estimate.peak_allocated
        return saved if saved > _LEAST_SAVING * self.plain.peak_allocated else 0

    def _minus(self, estimate: MemoryEstimate) -> str:
        return f"minus {format_size(self._saving(estimate))}"

    def _peak(self, estimate: MemoryEstimate) -> str:
        return f"{format_size(estimate.peak_allocated)} within {format_size(self._usable)}"

    def _whether(self, estimate: MemoryEstimate, *, fits: bool) -> str:
        if fits:
            return f"fits, with a peak of {self._peak(estimate)}"
        over = estimate.peak_allocated - self._usable
        return (
            f"not enough by itself: a peak of {format_size(estimate.peak_allocated)}, "
            + (f"{format_size(over)} too much" if over > 0 else f"too fragmented for {format_size(self._usable)}")
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Largest:
    """The largest batch that fits.

    Attributes:
        size: How many samples; 0 where not even one fits.
        estimate: What it needs; None where none fits.
        end: What is known of larger ones.
    """

    size: int
    estimate: MemoryEstimate | None = None
    end: str = ""


class NotFoundError(Exception):
    """There is nothing to suggest; the message says why."""


def _carried_out(check: Check, unchecked: Action, why_not: str) -> list[Action]:
    """What a check found; the action as unchecked, with the reason, where it could not be carried out."""
    if not why_not:
        try:
            return list(check())
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything over fake tensors
            why_not = _in_a_line(error)
    fields: dict[str, Any] = {"kind": unchecked.kind, "title": unchecked.title, "code": unchecked.code}
    return [Action(**fields, detail=why_not)]


def _trainer(precision: str) -> str:
    return f'Trainer(precision="{precision}")'


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, (OutOfTimeError, NotFoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
