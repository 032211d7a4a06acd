"""The checks of a report: which changes of the failed step are tried, in which order, and what they found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lightning_memtools.checkpointing.loss_head import possible_heads
from lightning_memtools.oom import advice, cause_advice
from lightning_memtools.oom.combined_advice import COMBINE, combined
from lightning_memtools.oom.deadline import Deadline
from lightning_memtools.oom.failed_step import FailedStep
from lightning_memtools.oom.fragmentation import IN_PIECES
from lightning_memtools.oom.recorded_history import ReplayVerdict, with_expandable_segments
from lightning_memtools.oom.report_page import Action, ActionKind, ranked
from lightning_memtools.oom.step_trials import StepTrials, in_a_line

_LONG_S = 30.0


@dataclass(frozen=True, slots=True)
class AdviceCheck:
    """One change to try.

    Attributes:
        run: Tries the change, and yields actions.
        unchecked: The action to show where the check cannot be carried out.
        applies: Returns whether the change makes sense for the failed step.
        only_if_nothing_fits: True if the check is only useful when no other change is enough.
        is_long: True if the check is left out, without a word, where less than 30 s are left: `memtools plan` has more.
        needs_trace: True if the check cannot be carried out for a step that cannot be traced.
        needs_whole_model: True if the check makes no sense where FSDP 2 shards the model: its figures would be those of
            all ranks together.
    """

    run: Callable[[StepTrials], Iterator[Action]]
    unchecked: Action
    applies: Callable[[FailedStep], bool]
    needs_trace: bool = True
    needs_whole_model: bool = False
    only_if_nothing_fits: bool = False
    is_long: bool = False


def _is_training(failed: FailedStep) -> bool:
    return failed.stage == "train"


def _grows(failed: FailedStep) -> bool:
    grown = failed.facts.grown
    # Predictions that are kept have an action of their own.
    return grown is not None and 2 * failed.predictions < grown.n_bytes


def _grows_unseen(failed: FailedStep) -> bool:
    """Return True if memory grows, and those that were found hold less than half of it."""
    piles = sum(one.n_bytes for one in failed.held.found if one.piles_up) + failed.held.garbage_bytes
    return _grows(failed) and failed.facts.grown is not None and 2 * piles < failed.facts.grown.n_bytes


def _is_garbage(failed: FailedStep) -> bool:
    return failed.held.garbage_bytes > _LEAST_GARBAGE * (failed.facts.stats.allocated or 0)


def _has_two_copies(failed: FailedStep) -> bool:
    hook = failed.facts.moment.hook
    return failed.facts.split is not None and ("checkpoint" in hook or hook.endswith("load_state_dict"))


def _is_in_pieces(failed: FailedStep) -> bool:
    """Return True if the request would have found memory, had what is free not lain in pieces."""
    facts, history = failed.facts, failed.history
    if history is None or history.failed is None or history.config.expandable_segments:
        return False
    return (facts.unusable or 0) > max(history.failed.n_bytes, IN_PIECES * (facts.stats.reserved or 0))


# As a share of what is allocated.
_LEAST_GARBAGE = 0.05

CHECKS = (
    AdviceCheck(cause_advice.release, cause_advice.RELEASE, lambda it: bool(it.held.found), needs_trace=False),
    AdviceCheck(cause_advice.two_copies, cause_advice.ONE_COPY, _has_two_copies, needs_trace=False),
    AdviceCheck(cause_advice.garbage, cause_advice.COLLECT_GARBAGE, _is_garbage, needs_trace=False),
    AdviceCheck(cause_advice.growth, cause_advice.FIND_GROWTH, _grows_unseen, needs_trace=False),
    AdviceCheck(
        cause_advice.rare_batch, cause_advice.RUN_IN_PARTS, lambda it: it.facts.before is not None, needs_trace=False
    ),
    AdviceCheck(
        advice.expandable_segments,
        advice.USE_EXPANDABLE_SEGMENTS,
        lambda it: it.is_cuda_like and not it.config.expandable_segments,
        needs_trace=False,
    ),
    AdviceCheck(advice.allocator_settings, advice.USE_SETTING, _is_in_pieces, needs_trace=False),
    AdviceCheck(
        advice.empty_cache,
        advice.EMPTY_THE_CACHE,
        lambda it: it.evaluation_began is not None and not it.run.empties_cache,
        needs_trace=False,
    ),
    AdviceCheck(advice.processes, advice.STOP_PROCESSES, lambda it: bool(it.processes), needs_whole_model=True),
    AdviceCheck(
        advice.predictions,
        advice.KEEP_NO_PREDICTIONS,
        lambda it: it.stage == "predict" and it.predictions > 0,
        needs_whole_model=True,
    ),
    AdviceCheck(advice.larger_gpu, advice.LARGER_GPU, lambda it: it.is_cuda_like, needs_whole_model=True),
    AdviceCheck(advice.smaller_batch, advice.SMALLER_BATCHES, lambda _: True),
    AdviceCheck(
        advice.chunked_loss,
        advice.CHUNK_THE_LOSS,
        lambda it: _is_training(it) and bool(possible_heads(it.run.model)) and not (it.run.plan and it.run.plan.heads),
    ),
    AdviceCheck(advice.precision, advice.BFLOAT16, lambda it: it.precision == "32-true", needs_whole_model=True),
    AdviceCheck(advice.optimizer, advice.SMALLER_STATE, _is_training, needs_whole_model=True),
    AdviceCheck(advice.accumulation, advice.ACCUMULATE, lambda it: _is_training(it) and it.run.can_accumulate),
    AdviceCheck(advice.checkpointing, advice.RECOMPUTE, _is_training),
    AdviceCheck(
        advice.offload,
        advice.OFFLOAD,
        lambda it: it.is_cuda_like and _is_training(it) and it.run.plan is None,
        is_long=True,
        needs_whole_model=True,
    ),
    AdviceCheck(combined, COMBINE, _is_training, only_if_nothing_fits=True, needs_whole_model=True),
)
"""In this order: what takes little time comes first, and combinations after all single changes."""

# What is not changed in the program.
_OTHER_HARDWARE = {ActionKind.LARGER_GPU, ActionKind.STOP_PROCESS}


class AdviceChecks:
    """All checks of one report, as far as the time allows.

    Args:
        failed: The failed step.
        deadline: The time by which to end.

    Attributes:
        request: The bytes that the program requested, by the recorded history; None where there is none.
        expandable: The verdict on expandable segments; None where no history was recorded.
        actions: The actions found, the best first.
        modules: Bytes of activations that the traced step keeps, by module, largest first.
        notes: Further remarks.
    """

    def __init__(self, failed: FailedStep, deadline: Deadline) -> None:
        self.request: int | None = None
        self.expandable: ReplayVerdict | None = None
        self.actions: list[Action] = []
        self.modules: tuple[tuple[str, int], ...] = ()
        self.notes: list[str] = []
        self._failed = failed
        self._deadline = deadline

    def run(self) -> None:
        """Run the checks."""
        history = self._failed.history
        found: list[Action] = []
        # Warnings that the step gives while it is traced were given while it ran.
        with warnings.catch_warnings(), self._deadline.interrupting():
            warnings.simplefilter("ignore")
            if history is not None:
                self.request = None if history.failed is None else history.failed.n_bytes
                self.expandable = with_expandable_segments(history)
            trials = StepTrials(self._failed, self._deadline)
            if not trials.why_not:
                self.modules = _modules(trials)
                self._note(trials)
            for check in CHECKS:
                if not check.applies(self._failed) or (check.needs_whole_model and self._failed.run.is_sharded):
                    continue
                is_enough = any(action.fits and action.kind not in _OTHER_HARDWARE for action in found)
                if (check.only_if_nothing_fits and is_enough) or (check.is_long and self._deadline.left_s < _LONG_S):
                    continue
                found += _carried_out(check, trials)
        self.actions = ranked(found)

    def _note(self, trials: StepTrials) -> None:
        if self._failed.run.is_sharded:
            self.notes.append(
                "FSDP 2 shards this model. The peaks are those of one device that holds it whole: a rank holds the "
                "same activations, and a part of the parameters, gradients and optimizer state. Its peak falls by "
                "about as much as is said here; whether that is enough is not known."
            )
        if trials.plain_fits:
            peak = trials.within(trials.plain.peak_allocated)
            self.notes.append(
                f"Traced by itself, this step fits: its peak is {peak}. So the cause is fragmentation, or memory that "
                "a trace does not show, such as what a hook or a callback allocates, and a trace cannot tell what "
                "would be enough."
            )
        if _grows(self._failed):
            self.notes.append("As long as memory grows from batch to batch, everything else only delays the failure.")
        self.notes += trials.plain.notes


def _modules(trials: StepTrials) -> tuple[tuple[str, int], ...]:
    """Return activations by module, largest first: in training those kept for backward, else those at the peak."""
    in_training = trials.failed.stage == "train"
    found = (
        (module.name or "(the model)", module.saved_bytes if in_training else module.at_peak_bytes)
        for module in trials.plain.modules
    )
    return tuple(sorted(found, key=lambda item: -item[1]))


def _carried_out(check: AdviceCheck, trials: StepTrials) -> list[Action]:
    """Return the actions that a check found; if it was not carried out to its end, also why not."""
    why_not = trials.why_not if check.needs_trace else ""
    found: list[Action] = []
    if not why_not:
        try:
            found.extend(check.run(trials))  # keeps what came before an error
        except Exception as error:  # noqa: BLE001, the user's own step runs here and may raise anything on fake tensors
            why_not = in_a_line(error)
    return [*found, replace(check.unchecked, detail=why_not)] if why_not else found
