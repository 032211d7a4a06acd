"""Tries what could be done about a failed step: which checks there are, in which order, and what came of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_memtools.oom import replayed_advice as replayed
from lightning_memtools.oom import traced_advice as traced
from lightning_memtools.oom.actions import Action, ranked
from lightning_memtools.oom.deadline import Deadline
from lightning_memtools.oom.fragmentation import Verdict, with_expandable_segments
from lightning_memtools.oom.situation import Situation
from lightning_memtools.oom.trials import Trials, in_a_line


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try.

    Attributes:
        run: Tries it.
        unchecked: What is said where it cannot be carried out; None where it only betters what another check found,
            whose actions of the same kind it then replaces.
        applies: Whether it is a question at all.
        needs_trace: Whether a step that cannot be traced is one for which it cannot be carried out.
    """

    run: Callable[[Trials], Iterator[Action]]
    unchecked: Action | None
    applies: Callable[[Situation], bool]
    needs_trace: bool = True


def _is_training(situation: Situation) -> bool:
    return situation.stage == "train"


def _grows(situation: Situation) -> bool:
    grown = situation.facts.grown
    # Predictions that are kept have a line of their own.
    return grown is not None and 2 * situation.predictions < grown.n_bytes


CHECKS = (
    Check(
        replayed.expandable_segments,
        replayed.LET_SEGMENTS_GROW,
        lambda it: it.is_cuda_like and not it.config.expandable_segments,
        needs_trace=False,
    ),
    Check(
        replayed.empty_cache,
        replayed.EMPTY_THE_CACHE,
        lambda it: it.evaluation_began is not None and not it.empties_cache,
        needs_trace=False,
    ),
    Check(replayed.processes, replayed.STOP_PROCESSES, lambda it: bool(it.processes)),
    Check(
        replayed.predictions,
        replayed.KEEP_NO_PREDICTIONS,
        lambda it: it.stage == "predict" and it.predictions > 0,
    ),
    Check(traced.growth, traced.FIND_GROWTH, _grows),
    Check(traced.larger_gpu, traced.LARGER_GPU, lambda it: it.is_cuda_like),
    Check(traced.smaller_batch, traced.SMALLER_BATCHES, lambda _: True),
    Check(traced.checkpointing, traced.RECOMPUTE, _is_training),
    Check(traced.precision, traced.BFLOAT16, lambda it: it.precision == "32-true"),
    Check(traced.accumulation, traced.ACCUMULATE, _is_training),
    Check(traced.optimizer, traced.SMALLER_STATE, _is_training),
    Check(traced.least_recomputation, None, lambda it: _is_training(it) and it.plan is None),
)
"""In their order: what takes little time first, then what helps most."""


class Checks:
    """All checks of one report, those that are reached in time.

    Args:
        situation: What failed.
        deadline: When to end.

    Attributes:
        request: What the program asked for, in bytes, as the recorded history has it; None where there is none.
        expandable: Whether expandable segments would have served the request; None where no history was recorded.
        actions: What was found, in the order of their worth.
        modules: Activations that the traced step keeps, by module, largest first.
        notes: What else is to be known.
    """

    def __init__(self, situation: Situation, deadline: Deadline) -> None:
        self.request: int | None = None
        self.expandable: Verdict | None = None
        self.actions: list[Action] = []
        self.modules: tuple[tuple[str, int], ...] = ()
        self.notes: list[str] = []
        self._situation = situation
        self._deadline = deadline

    def run(self) -> None:
        """Do them."""
        history = self._situation.history
        found: list[Action] = []
        # Advice that the step gives while it is traced was given while it ran.
        with warnings.catch_warnings(), self._deadline.interrupting():
            warnings.simplefilter("ignore")
            if history is not None:
                self.request = None if history.failed is None else history.failed.n_bytes
                self.expandable = with_expandable_segments(history)
            trials = Trials(self._situation, self._deadline)
            if not trials.why_not:
                self.modules = trials.modules
                self._note(trials)
            for check in (check for check in CHECKS if check.applies(self._situation)):
                new = _carried_out(check, trials)
                if check.unchecked is None:
                    kinds = {action.kind for action in new}
                    found = [action for action in found if action.kind not in kinds]
                found += new
        self.actions = ranked(found)

    def _note(self, trials: Trials) -> None:
        if trials.plain_fits:
            peak = trials.beside(trials.plain.peak_allocated)
            self.notes.append(
                f"Traced by itself, this step fits: its peak is {peak}. So what failed is how the "
                "memory lay, or something that a trace does not show, such as what a hook or a callback makes; a trace "
                "cannot tell then what would be enough."
            )
        if _grows(self._situation):
            self.notes.append("As long as memory grows from batch to batch, everything else only delays the failure.")
        self.notes += trials.plain.notes


def _carried_out(check: Check, trials: Trials) -> list[Action]:
    """What a check found; the action as unchecked, with the reason, where it could not be carried out."""
    why_not = trials.why_not if check.needs_trace else ""
    if not why_not:
        try:
            return list(check.run(trials))
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything over fake tensors
            why_not = in_a_line(error)
    return [] if check.unchecked is None else [replace(check.unchecked, detail=why_not)]
