"""Checks of causes beside the step itself: memory held or growing, an odd batch, fragmentation, other processes."""

from __future__ import annotations

from dataclasses import replace

from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.leaks.freeing import how_to_free
from lightning_memtools.memory.leaks.holder_search import Holding
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.actions import Action, ActionKind, Outcome
from lightning_memtools.oom.failure_facts import LEAST_ODD
from lightning_memtools.oom.step_trials import NotCheckedError, StepTrials
from lightning_memtools.reporting.held_words import holding_in_words, is_cause, owners_in_words

_IN_PIECES = 0.2  # of what is reserved: so much that is free in pieces is fragmentation
_MOST_HOLDERS = 5
_LEAST_SHARE = 0.01  # of what is allocated
_LARGE_SHARE = 0.2  # of the device: another process that holds so much is a cause
_MOST_PARTS = 8  # of OOMRecovery
_MOST_SHAPES = 3


def _freed(trials: StepTrials, action: Action, n_bytes: int, how: str, cause: str) -> Action:
    """Complete the action with the texts `how` and `cause`, and with whether the step fits if `n_bytes` are freed."""
    fits = trials.fits_with(n_bytes)
    if trials.why_not:
        whether = f"Whether the step then fits is not known: it could not be traced ({trials.why_not})"
    else:
        words = {True: "fits", False: "does not fit yet", None: "may or may not fit"}[fits]
        whether = f"Without it, the traced step {words}"
    detail = f"{how}. {whether}" if how else whether
    return replace(action, outcome=Outcome.of(fits=fits), detail=detail, saved=n_bytes, cause=cause)


def release(trials: StepTrials) -> list[Action]:
    """Suggest releasing memory that objects other than the model and optimizers hold: one action for each object."""
    held, allocated = trials.failed.held, trials.failed.facts.stats.allocated or 0
    least = _LEAST_SHARE * allocated
    actions = []
    for holding in [holding for holding in held.found if holding.n_bytes > least][:_MOST_HOLDERS]:
        action = Action(kind=ActionKind.HOLDER, title=f"{_verb(holding)} {holding_in_words(holding)}")
        cause = _cause(holding) if is_cause(holding, allocated) else ""
        actions.append(_freed(trials, action, holding.n_bytes, how_to_free(holding), cause))
    if held.garbage_bytes > 5 * least:
        size = format_size(held.garbage_bytes)
        title = f"Collect garbage: {size} were held by objects that refer to each other, and that nobody uses"
        action = Action(kind=ActionKind.HOLDER, title=title, code="gc.collect()")
        actions.append(_freed(trials, action, held.garbage_bytes, "", f"Garbage that was not collected held {size}"))
    return actions


def _verb(holding: Holding) -> str:
    if holding.owners:
        return "Delete what is left of another run:" if holding.is_left_over else "Keep on the host, or do without:"
    return "Delete or detach" if holding.piles_up else "Keep on the host, if it is not needed here:"


def _cause(holding: Holding) -> str:
    size = format_size(holding.n_bytes)
    if holding.is_left_over:
        return f"`{holding.path}` keeps {owners_in_words(holding)} of another run alive, {size}"
    return f"`{holding.path}` holds {size}"


def growth(trials: StepTrials) -> list[Action]:
    """Suggest finding what accumulates from batch to batch, if memory grows and known objects do not explain why."""
    grown = trials.failed.facts.grown
    assert grown is not None
    each = format_size(grown.n_bytes // grown.n_batches)
    action = Action(kind=ActionKind.GROWTH, title=f"Find what grows by {each} a batch")
    how = (
        f"In {grown.n_batches} batches, {format_size(grown.n_bytes)} have accumulated that belong neither to the model "
        "nor to its optimizers or inputs. The usual cause is losses or outputs that are kept with their graph (use "
        "`.detach()`)"
    )
    return [_freed(trials, action, grown.n_bytes, how, f"Memory grew by {each} in each batch")]


def odd_batch(trials: StepTrials) -> list[Action]:
    """Suggest running an unusually large batch in parts, if batches of the usual size fit."""
    facts, recovery = trials.failed.facts, trials.failed.run.recovery
    before, fits, detail = facts.before, None, ""
    if not trials.why_not:
        usual = trials.having(batch=before.largest)
        is_far_larger = trials.plain.peak_allocated >= LEAST_ODD * usual.peak_allocated
        if not (is_far_larger if trials.limit is None else trials.fits(usual)):
            return []
        detail = f"Its step takes {format_size(trials.plain.peak_allocated)}, and that of the largest batch before it "
        detail += f"{format_size(usual.peak_allocated)}. "
    shapes = [f"`{name}` is {list(now)}, usually at most {list(most)}" for name, now, most in before.odd(facts.batch)]
    cause = f"This batch is an odd one: {'; '.join(shapes[:_MOST_SHAPES])}"
    alike = "To keep batches alike, sort or bucket samples by their size, or cap it"
    action = Action(kind=ActionKind.RARE_BATCH, title="Run the rare large batch in parts", code=recovery, cause=cause)
    if not recovery:
        how = f"{detail}{alike}"
        return [replace(action, title="Avoid the rare large batch", outcome=Outcome.MAY_BE_ENOUGH, detail=how)]
    if not trials.why_not and trials.limit is not None:
        fits = trials.fits(trials.at(-(-trials.size // _MOST_PARTS)))
    whether = {True: "it then fits", False: "it does not fit either", None: "it may or may not fit"}[fits]
    detail += f"OOMRecovery runs such a batch in up to {_MOST_PARTS} parts, and the others whole: {whether}. {alike}"
    return [replace(action, outcome=Outcome.of(fits=fits), detail=detail)]


def expandable_segments(trials: StepTrials) -> list[Action]:
    """Suggest expandable segments, if a replay of the recorded allocations shows that the step would then fit."""
    failed = trials.failed
    if failed.history is None:
        raise NotCheckedError("no history of allocations was recorded")
    served, why = failed.history.with_expandable_segments()
    if served is None:
        raise NotCheckedError(why)
    detail, code = f"In a replay of the recorded allocations, {why}", 'PYTORCH_ALLOC_CONF="expandable_segments:True"'
    action = Action(kind=ActionKind.EXPANDABLE_SEGMENTS, title="Use expandable segments", code=code)
    if not served:
        return [replace(action, outcome=Outcome.USELESS, detail=detail)]
    if trials.why_not or failed.usable is None:
        detail += ". Whether the rest of the step would fit is not known"
        return [replace(action, outcome=Outcome.MAY_BE_ENOUGH, detail=detail)]
    plain = trials.plain
    config = replace(plain.trace.config, expandable_segments=True)
    peak, usable = format_size(plain.peak_allocated), format_size(failed.usable)
    if not replay(plain.trace, config=config, capacity=failed.usable).completed:
        detail += f". The whole step does not fit: its peak is {peak}, and {usable} are available"
        return [replace(action, outcome=Outcome.USELESS, detail=detail)]
    detail += f". The whole step fits, with a peak of {peak} within the available {usable}"
    unusable, reserved = failed.facts.unusable or 0, failed.facts.stats.reserved or 0
    pieces = f"{format_size(unusable)} of the {format_size(reserved)} that are reserved lay in pieces (fragmentation)"
    cause = pieces if unusable >= _IN_PIECES * reserved else ""
    return [replace(action, outcome=Outcome.ENOUGH, detail=detail, cause=cause)]


def processes(trials: StepTrials) -> list[Action]:
    """Suggest stopping other processes on the GPU, if they leave less memory than this process is allowed to use."""
    others, facts, capacity = trials.failed.processes, trials.failed.facts, trials.failed.facts.stats.capacity or 0
    if isinstance(others, str):
        raise NotCheckedError(f"the other processes are {others}")
    actions = []
    for process in others or ():
        if process.used_bytes and capacity - (facts.used_by_others or 0) < facts.fraction * capacity:
            name = f"{process.name or 'process'} (pid {process.pid})"
            holds = f"{name} holds {format_size(process.used_bytes)}"
            action = Action(kind=ActionKind.STOP_PROCESS, title=f"Stop {name}")
            freed = _freed(trials, action, process.used_bytes, f"{holds[0].upper()}{holds[1:]}", holds)
            is_large = freed.outcome is Outcome.ENOUGH and process.used_bytes > _LARGE_SHARE * capacity
            actions.append(freed if is_large else replace(freed, cause=""))
    return actions
