"""Pairs of changes, for a step that no single change makes fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

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

COMBINE = Action(kind=ActionKind.COMBINATION, title="Combine two changes")
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True)
class StepChange:
    """One change of a step that can be combined with another.

    Attributes:
        title: The change in a few words.
        code: The code to write in the program.
        cost: What it costs, to rank pairs: computation first, then what changes the result of training.
        arguments: The arguments of `FailedStep.estimate` that make it.
        note: A remark on how it was traced.
    """

    title: str
    code: str
    cost: float
    arguments: dict[str, Any]
    note: str = ""


def combined(trials: StepTrials) -> Iterator[Action]:
    """Pairs of changes that make the step fit, the cheapest first; where none does, the one with the least peak."""
    if not trials.can_tell_what_fits:
        return
    n_found, misses = 0, list[tuple[int, StepChange, StepChange]]()
    for one, other in sorted(combinations(_changes(trials), 2), key=lambda pair: pair[0].cost + pair[1].cost):
        if one.arguments.keys() & other.arguments.keys():  # two of the optimizer
            continue
        estimate = trials.failed.estimate(**one.arguments, **other.arguments)
        if not trials.fits(estimate):
            misses.append((estimate.peak_allocated, one, other))
            continue
        yield _action(trials, one, other, estimate.peak_allocated, fits=True)
        n_found += 1
        if n_found == _MOST_SHOWN:
            return
    if misses and not n_found:
        peak, one, other = min(misses, key=lambda miss: miss[0])
        yield _action(trials, one, other, peak, fits=False)


def _changes(trials: StepTrials) -> list[StepChange]:
    failed = trials.failed
    changes: list[StepChange] = []
    if failed.precision == "32-true":
        changes.append(StepChange(BFLOAT16.title, BFLOAT16.code, 0.5, {"precision": BF16}))
    if failed.run.plan is None and trials.plans.best.plan.refused is None:
        best = trials.plans.best
        changes.append(StepChange(RECOMPUTE.title, best.code, 1.0, {"plan": best.plan}))
    least = _smallest_batch(trials)
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


def _smallest_batch(trials: StepTrials) -> int | None:
    """Return the smallest batch with which the step can be traced: BatchNorm refuses to train on one sample."""
    for size in (1, 2):
        with suppress(ValueError):
            trials.at(size)
            return size
    return None


def _action(trials: StepTrials, one: StepChange, other: StepChange, peak: int, *, fits: bool) -> Action:
    detail = trials.verdict(peak, fits=fits, alone="together")
    return replace(
        COMBINE,
        title=in_series([one.title, f"{other.title[0].lower()}{other.title[1:]}"]),
        code=f"{one.code}, {other.code}",
        detail=". ".join(filter(None, [detail, one.note, other.note])),
        checked=True,
        fits=fits,
        saved=trials.saving(peak),
        peak=peak,
    )
