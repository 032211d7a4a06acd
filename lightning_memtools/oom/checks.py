"""Tries what could be done about a failed step: on fake tensors, or by replaying the recorded history."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.checkpointing.options import Options
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, CheckpointPlan, make_plan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.batch_size import largest_batch
from lightning_memtools.estimate.limits import Limit
from lightning_memtools.memory.capacity import known_gpus
from lightning_memtools.memory.sizes import MIB, format_size
from lightning_memtools.oom.actions import Action, Kind, ranked
from lightning_memtools.oom.deadline import Deadline, OutOfTimeError
from lightning_memtools.oom.fragmentation import Verdict, with_empty_cache, with_expandable_segments, with_more_memory
from lightning_memtools.oom.situation import Situation

_BUDGET_STEPS = 4
_LOADERS = {"train": "train", "val": "validation", "test": "test", "predict": "prediction"}


class Checks:
    """All checks of one report, those that are reached in time.

    Args:
        situation: What failed.
        deadline: When to end.

    Attributes:
        expandable: Whether expandable segments would have served the request; None where no history was recorded.
        plain: The estimate of the step as it was; None where it could not be traced.
        actions: What was found, in the order of their worth.
        modules: Activations that the traced step keeps, by module, largest first.
        notes: What else is to be known.
    """

    def __init__(self, situation: Situation, deadline: Deadline) -> None:
        self.expandable: Verdict | None = None
        self.plain: MemoryEstimate | None = None
        self.actions: list[Action] = []
        self.modules: tuple[tuple[str, int], ...] = ()
        self.notes: list[str] = []
        self._situation = situation
        self._deadline = deadline
        self._estimates: dict[tuple[int, int], MemoryEstimate] = {}

    def run(self) -> None:
        """Do them, the quick ones first."""
        found: list[Action] = []
        # Advice that the step gives while it is traced was given while it ran.
        with warnings.catch_warnings(), self._deadline.interrupting():
            warnings.simplefilter("ignore")
            found += self._replays()
            why_not = self._situation.why_not_traced() or self._trace_plain()
            training = self._situation.stage == "train"
            checks: list[tuple[Callable[[], Iterator[Action]], Action]] = [
                (self._batch_size, Action(kind=Kind.BATCH_SIZE, title="Use smaller batches")),
                (self._processes, Action(kind=Kind.STOP_PROCESS, title="Stop other processes on the device")),
                (self._precision, Action(kind=Kind.PRECISION, title="Compute in bfloat16", code=_trainer("bf16-mixed"))),
            ]
            if training:
                checks[1:1] = [
                    (self._checkpointing, Action(kind=Kind.CHECKPOINTING, title="Recompute activations",
                                                 code="GradientCheckpointing()")),
                    (self._accumulation, Action(kind=Kind.ACCUMULATION,
                                                title="Accumulate gradients over smaller batches",
                                                code="Trainer(accumulate_grad_batches=...)")),
                ]  # fmt: skip
                checks.append(
                    (self._optimizer, Action(kind=Kind.OPTIMIZER, title="Use an optimizer with a smaller state"))
                )
            if self._situation.stage == "predict":
                checks.append((self._predictions, Action(kind=Kind.PREDICTIONS, title="Keep no predictions")))
            checks.append((self._larger_gpu, Action(kind=Kind.LARGER_GPU, title="Use a larger GPU")))
            for check, unchecked in checks:
                found += _carried_out(check, unchecked, why_not)
        self.actions = ranked(found)

    # --- replays of what was recorded

    def _replays(self) -> Iterator[Action]:
        situation = self._situation
        history, evaluation = situation.history, situation.evaluation_began
        code = 'PYTORCH_ALLOC_CONF="expandable_segments:True"'
        title = "Let segments grow"
        if history is None:
            yield Action(kind=Kind.EXPANDABLE_SEGMENTS, title=title, code=code, detail="no history was recorded")
        else:
            self.expandable = with_expandable_segments(history)
            if not history.config.expandable_segments:
                yield _of_verdict(self.expandable, Kind.EXPANDABLE_SEGMENTS, title, code)
        if evaluation is not None and not situation.empties_cache:
            title = "Empty the cache before evaluation"
            if history is None:
                yield Action(
                    kind=Kind.EMPTY_CACHE, title=title, code="EmptyCache()", detail="no history was recorded"
                )
            else:
                yield _of_verdict(with_empty_cache(history, evaluation), Kind.EMPTY_CACHE, title, "EmptyCache()")

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
        size = self._size
        found, exact = self._largest_batch()
        if found >= size:
            return
        if found == 0:
            yield Action(
                kind=Kind.BATCH_SIZE, title="Use smaller batches", checked=True, fits=False,
                detail="not even one sample fits",
            )  # fmt: skip
            return
        what = _LOADERS[self._situation.stage or "train"]
        end = f"{found + 1} does not fit" if exact else "a larger one may fit: there was no time to find out"
        yield Action(
            kind=Kind.BATCH_SIZE,
            title=f"Use {what} batches of {found} in place of {size}",
            detail=f"fits, with a peak of {self._peak(self._at(found))}; {end}",
            checked=True,
            fits=True,
            saved=self._saving(self._at(found)),
            code=f"DataLoader(batch_size={found})",
        )

    def _checkpointing(self) -> Iterator[Action]:
        plan, budget = self._plan()
        assert plan.plain is not None
        if plan.refused is not None:
            raise NotFoundError(plan.refused)
        names = ", ".join(f"`{chain.name or '(the model)'}`" for chain in plan.chains if chain.ranges)
        estimate = self._situation.estimate(plan=plan)
        fits = self._fits(estimate)
        yield Action(
            kind=Kind.CHECKPOINTING,
            title=f"Recompute activations of {names}",
            detail=(
                f"{self._minus(estimate)} at {plan.extra_operations:.0%} more computation, "
                f"{_whether(fits)} with a peak of {self._peak(estimate)}"
            ),
            checked=True,
            fits=fits,
            saved=self._saving(estimate),
            code="GradientCheckpointing()" if budget is None else f'GradientCheckpointing(memory_budget="{budget}")',
        )

    def _accumulation(self) -> Iterator[Action]:
        size, accumulate = self._size, self._situation.accumulate
        found, _ = self._largest_batch()
        effective = size * accumulate
        for smaller in range(min(found, size - 1), 0, -1):
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
                    code=f"DataLoader(batch_size={smaller}), "
                    f"Trainer(accumulate_grad_batches={effective // smaller})",
                )
                return

    def _precision(self) -> Iterator[Action]:
        if self._situation.precision != "32-true":
            return
        estimate = self._situation.estimate(precision="bf16-mixed")
        yield self._compared(estimate, Kind.PRECISION, "Compute in bfloat16", _trainer("bf16-mixed"))

    def _optimizer(self) -> Iterator[Action]:
        optimizers = self._situation.optimizers
        if len(optimizers) != 1 or isinstance(optimizers[0], (torch.optim.SGD, torch.optim.Adafactor)):
            return
        makes: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
            # Its second moments are kept by row and column; it has no first ones.
            "torch.optim.Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
            "torch.optim.SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        }
        problem: Exception | None = None
        for name, make in makes.items():
            try:
                estimate = self._situation.estimate(optimizer=make)
            except OutOfTimeError:
                raise
            except Exception as error:  # noqa: BLE001, as in `_trace_plain`; then the next one is tried
                problem = error
                continue
            arguments = "momentum=0.9, ..." if name.endswith("SGD") else "..."
            title = f"Use an optimizer with a smaller state than {type(optimizers[0]).__name__}'s"
            yield self._compared(estimate, Kind.OPTIMIZER, title, f"{name}(parameters, {arguments})")
            return
        assert problem is not None
        raise problem

    def _processes(self) -> Iterator[Action]:
        processes = self._situation.processes
        if processes is None or isinstance(processes, str):
            return
        for process in processes:
            if process.used_bytes:
                title = f"Stop {process.name or 'process'} (pid {process.pid})"
                yield self._more_memory(Kind.STOP_PROCESS, title, process.used_bytes, "it holds")

    def _predictions(self) -> Iterator[Action]:
        held = self._situation.predictions
        if held:
            code = "trainer.predict(return_predictions=False)"
            yield self._more_memory(Kind.PREDICTIONS, "Keep no predictions on the device", held, "they hold", code)

    def _larger_gpu(self) -> Iterator[Action]:
        assert self.plain is not None
        beside = self._situation.untraced
        for gpu in sorted(known_gpus(), key=lambda gpu: gpu.usable_bytes):
            usable = Limit.parse(gpu.name).usable - beside
            if usable > self._usable and self.plain.peak_allocated <= usable and self.plain.fits(f"{usable}B"):
                yield Action(
                    kind=Kind.LARGER_GPU,
                    title=f"Use a larger GPU, such as an {gpu.name}" if gpu.name[0] in "AHL" else
                    f"Use a larger GPU, such as a {gpu.name}",
                    detail="the smallest of those known on which this step fits as it is",
                    checked=True,
                    fits=True,
                )  # fmt: skip
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

    def _fits(self, estimate: MemoryEstimate) -> bool:
        return self._usable > 0 and estimate.fits(f"{self._usable}B")

    def _largest_batch(self) -> tuple[int, bool]:
        """The largest batch that fits, and whether one more is known not to."""
        known: dict[int, bool] = {}

        def fits(size: int) -> bool:
            known[size] = self._fits(self._at(size))
            return known[size]

        try:
            found = largest_batch(
                self._size, fits=fits, peak=lambda size: self._at(size).peak_allocated, limit=self._usable
            )
        except OutOfTimeError:
            fitting = [size for size, does in known.items() if does]
            if not fitting:
                raise
            return max(fitting), False
        return found, True

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
        fits = self._fits(estimate)
        return Action(
            kind=kind,
            title=title,
            detail=f"{self._minus(estimate)}, {_whether(fits)} with a peak of {self._peak(estimate)}",
            checked=True,
            fits=fits,
            saved=self._saving(estimate),
            code=code,
        )

    def _saving(self, estimate: MemoryEstimate) -> int:
        assert self.plain is not None
        return self.plain.peak_allocated - estimate.peak_allocated

    def _minus(self, estimate: MemoryEstimate) -> str:
        return f"minus {format_size(max(self._saving(estimate), 0))}"

    def _peak(self, estimate: MemoryEstimate) -> str:
        return f"{format_size(estimate.peak_allocated)} of {format_size(self._usable)}"


class NotFoundError(Exception):
    """There is nothing to suggest; the message says why."""


def _carried_out(check: Callable[[], Iterator[Action]], unchecked: Action, why_not: str) -> list[Action]:
    """What a check found; the action as unchecked, with the reason, where it could not be carried out."""
    if not why_not:
        try:
            return list(check())
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything over fake tensors
            why_not = _in_a_line(error)
    fields: dict[str, Any] = {"kind": unchecked.kind, "title": unchecked.title, "code": unchecked.code}
    return [Action(**fields, detail=why_not)]


def _of_verdict(verdict: Verdict, kind: Kind, title: str, code: str) -> Action:
    if verdict.served is None:
        return Action(kind=kind, title=title, code=code, detail=verdict.why)
    return Action(
        kind=kind, title=title, code=code, detail=f"{verdict.why}, as a replay of the recorded history shows",
        checked=True, fits=verdict.served,
    )  # fmt: skip


def _whether(fits: bool) -> str:
    return "fits" if fits else "does not fit by itself"


def _trainer(precision: str) -> str:
    return f'Trainer(precision="{precision}")'


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, (OutOfTimeError, NotFoundError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
