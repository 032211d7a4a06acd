"""Combinations of changes, for a step that no single change makes fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.oom.advice import (
    ACCUMULATE,
    BF16,
    BFLOAT16,
    RECOMPUTE,
    loader_code,
)
from lightning_memtools.oom.other_optimizers import fused_form, smaller_states
from lightning_memtools.oom.report_page import Action, ActionKind
from lightning_memtools.oom.step_trials import StepTrials
from lightning_memtools.reporting.phrases import in_series

COMBINE = Action(kind=ActionKind.COMBINATION, title="Combine several changes")
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True)
class StepChange:
    """One change of a step that can be combined with others.

    Attributes:
        title: The change in a few words.
        code: The code to write in the program.
        cost: What it costs, to rank combinations: computation first, then what changes the result of training.
        arguments: The arguments of `FailedStep.estimate` that make it.
        note: A remark on how it was traced.
    """

    title: str
    code: str
    cost: float
    arguments: dict[str, Any]
    note: str = ""


def combined(trials: StepTrials) -> Iterator[Action]:
    """Combinations of changes that make the step fit, the cheapest first.

    All of them together are tried first: where these do not fit, none does. Bfloat16 is left out of them once, because
    its copies of the weights may take more than it saves.
    """
    if not trials.can_tell_what_fits:
        return
    groups = _groups(_changes(trials))
    kinds = (groups, [group for group in groups if BFLOAT16.title not in _names(group)])
    widest = [max(kind, key=lambda group: (len(group), _cost(group))) for kind in kinds if kind]
    tried: dict[frozenset[str], MemoryEstimate] = {}
    for group in widest:
        tried[_names(group)] = trials.failed.estimate(**_arguments(group))
        if trials.fits(tried[_names(group)]):
            break
    else:
        if widest:
            least = min(widest, key=lambda group: tried[_names(group)].peak_allocated)
            peak = tried[_names(least)].peak_allocated
            detail = trials.verdict(peak, fits=False, alone="together")
            yield _action(trials, least, peak, fits=False, detail=detail)
        return
    found: list[frozenset[str]] = []
    for one in sorted(groups, key=_cost):
        names = _names(one)
        if any(known <= names for known in found):
            continue
        estimate = tried.get(names) or trials.failed.estimate(**_arguments(one))
        if trials.fits(estimate):
            found.append(names)
            peak = estimate.peak_allocated
            yield _action(trials, one, peak, fits=True, detail=trials.verdict(peak, fits=True))
        if len(found) == _MOST_SHOWN:
            return


def _groups(changes: Sequence[StepChange]) -> list[tuple[StepChange, ...]]:
    """Return all groups of two or more changes that can be made together: not two of the optimizer."""
    groups = [group for size in range(2, len(changes) + 1) for group in combinations(changes, size)]
    return [group for group in groups if len(_arguments(group)) == sum(len(change.arguments) for change in group)]


def _cost(group: Sequence[StepChange]) -> float:
    return sum(change.cost for change in group)


def _names(changes: Sequence[StepChange]) -> frozenset[str]:
    return frozenset(change.title for change in changes)


def _changes(trials: StepTrials) -> list[StepChange]:
    failed = trials.failed
    changes: list[StepChange] = []
    if failed.precision == "32-true":
        changes.append(StepChange(BFLOAT16.title, BFLOAT16.code, 0.5, {"precision": BF16}))
    if failed.run.plan is None and trials.best_plan.plan.refused is None:
        best = trials.best_plan
        changes.append(StepChange(RECOMPUTE.title, best.code, 1.0, {"plan": best.plan}))
    least = trials.smallest_batch
    effective = trials.size * failed.run.accumulate
    if failed.run.can_accumulate and least is not None and least < trials.size and effective % least == 0:
        n = effective // least
        code = f"{loader_code(least)}, Trainer(accumulate_grad_batches={n})"
        changes.append(StepChange(f"{ACCUMULATE.title} of {least}", code, 1.5, {"size": least, "accumulate": n}))
    if len(failed.run.optimizers) == 1:
        fused = fused_form(failed.run.optimizers[0]) if failed.may_fuse else None
        # The smallest state fits if any does.
        others = [fused, next(smaller_states(failed.run.optimizers[0]), None)]
        changes += [
            StepChange(one.title, one.code, one.cost, {"optimizer": one.make}, one.note) for one in others if one
        ]
    return changes


def _arguments(changes: Sequence[StepChange]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.arguments.items()}


def _action(trials: StepTrials, changes: Sequence[StepChange], peak: int, *, fits: bool, detail: str) -> Action:
    first, *rest = (change.title for change in changes)
    title = in_series([first, *(f"{title[0].lower()}{title[1:]}" for title in rest)])
    code = ", ".join(change.code for change in changes)
    detail += "".join(f". {change.note}" for change in changes if change.note)
    saved = trials.saving(peak)
    return replace(COMBINE, title=title, code=code, detail=detail, checked=True, fits=fits, saved=saved)
