"""The checks of a report: which changes of the failed step are tried, in which order, and with what results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_memtools.checkpointing.loss_head import possible_heads
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.memory.peak_holders import held_by
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom import cause_checks as causes
from lightning_memtools.oom import change_checks as changes
from lightning_memtools.oom.actions import Action, ranked
from lightning_memtools.oom.failed_step import FailedStep
from lightning_memtools.oom.step_trials import NotCheckedError, StepTrials, why_not_checked
from lightning_memtools.reporting.phrases import in_series

_LARGE_STATE = 0.2  # of a step's peak


class AdviceCheck(NamedTuple):
    """A change to suggest: its name, a test of whether a failed step may need it, and a function that tries it."""

    name: str
    applies: Callable[[FailedStep], bool]
    run: Callable[[StepTrials], list[Action]]


def _is_training(failed: FailedStep) -> bool:
    return failed.stage == "train"


def _grows_unseen(failed: FailedStep) -> bool:
    """Return True if memory grows with each batch, and known objects hold less than half of that growth."""
    grown, held = failed.facts.grown, failed.held
    piles = sum(holding.n_bytes for holding in held.found if holding.piles_up) + held.garbage_bytes
    return grown is not None and 2 * piles < grown.n_bytes


def _can_expand(failed: FailedStep) -> bool:
    return failed.is_cuda_like and not failed.config.expandable_segments


def _has_loss_head(failed: FailedStep) -> bool:
    return _is_training(failed) and failed.run.plan is None and bool(possible_heads(failed.run.model))


OF_CAUSES = (
    AdviceCheck("what is held", lambda it: bool(it.held.found or it.held.garbage_bytes), causes.release),
    AdviceCheck("what grows", _grows_unseen, causes.growth),
    AdviceCheck("the odd batch in parts", lambda it: bool(it.facts.before.odd(it.facts.batch)), causes.odd_batch),
    AdviceCheck("expandable segments", _can_expand, causes.expandable_segments),
    AdviceCheck("other processes", lambda it: bool(it.processes), causes.processes),
)
OF_CHANGES = (
    AdviceCheck("a larger GPU", lambda it: it.is_cuda_like, changes.larger_gpu),
    AdviceCheck("smaller batches", lambda _: True, changes.smaller_batch),
    AdviceCheck("the loss in chunks", _has_loss_head, changes.chunked_loss),
    AdviceCheck("bfloat16", lambda it: it.precision == "32-true", changes.bfloat16),
    AdviceCheck("accumulated gradients", lambda it: _is_training(it) and it.run.can_accumulate, changes.accumulation),
    AdviceCheck("GradientCheckpointing", _is_training, changes.checkpointing),
)
"""These need a trace of the step. In this order: what takes little time comes first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The suggested changes, and other results for a report. Changes may be missing if time ran out.

    Attributes:
        actions: The suggested changes, the best first.
        unchecked: Sentences that name the changes that could not be checked: one sentence for each reason.
        modules: Bytes of activations that the traced step keeps, by module, largest first.
        lines: For each line of code outside of modules, the bytes that it had allocated at the peak of the traced step.
        notes: Further remarks.
    """

    actions: Sequence[Action] = ()
    unchecked: Sequence[str] = ()
    modules: Sequence[tuple[str, int]] = ()
    lines: Sequence[tuple[str, int]] = ()
    notes: Sequence[str] = ()


def advice_for(failed: FailedStep, seconds: float) -> Advice:
    """Try all changes that may help a failed step; return the advice. No trial starts after `seconds` of CPU time."""
    actions: list[Action] = []
    reasons: dict[str, list[str]] = {}
    # Warnings that the step gives while it is traced were given while it ran.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = StepTrials(failed, seconds)
        for check in (*OF_CAUSES, *OF_CHANGES):
            try:
                if check.applies(failed):
                    if check in OF_CHANGES and trials.why_not:
                        raise NotCheckedError(trials.why_not)  # noqa: TRY301, as a check says it
                    actions += check.run(trials)
            except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything on fakes
                reasons.setdefault(why_not_checked(error), []).append(check.name)
        unchecked = [f"Not checked: {', '.join(names)} ({reason})." for reason, names in reasons.items()]
        if trials.why_not:
            return Advice(ranked(actions), unchecked)
        return Advice(ranked(actions), unchecked, _modules(trials), _lines(trials.plain), _notes(trials))


def _modules(trials: StepTrials) -> list[tuple[str, int]]:
    """Return the activation bytes of each module: in training, those kept for backward; otherwise those at the peak."""
    in_training = trials.failed.stage == "train"
    sizes = [
        (module.name or "(the model)", module.saved_bytes if in_training else module.at_peak_bytes)
        for module in trials.plain.modules
    ]
    return sorted(sizes, key=lambda item: -item[1])


def _lines(plain: MemoryEstimate) -> list[tuple[str, int]]:
    """Return, for each line of code outside of modules, such as in a loss function, its bytes at the peak."""
    outside = [holder for holder in plain.holders if holder.line and holder.module in {"", "(model)"}]
    return [*held_by(outside, "line").items()]


def _notes(trials: StepTrials) -> list[str]:
    failed, plain, notes = trials.failed, trials.plain, []
    if trials.plain_fits:
        notes.append(
            f"Traced by itself, this step fits: its peak is {format_size(plain.peak_allocated)} within the available "
            f"{format_size(failed.usable)}. So the cause is fragmentation, or memory that a trace does not show, such "
            "as what a hook or a callback allocates, and a trace cannot tell what would be enough."
        )
    if failed.facts.grown is not None:
        notes.append("As long as memory grows from batch to batch, everything else only delays the failure.")
    state = plain.composition["optimizer"]
    if _is_training(failed) and state > _LARGE_STATE * plain.peak_allocated:
        names = in_series(sorted({type(optimizer).__name__ for optimizer in failed.run.optimizers}))
        notes.append(
            f"The state of {names} takes {format_size(state)}. Another optimizer, such as SGD or an 8-bit form of "
            "Adam, may keep less; none was tried."
        )
    return [*notes, *plain.notes]
