"""Checks of what made memory run out beside the step itself: what is held, what grows, an odd batch, fragmentation."""

from __future__ import annotations

from dataclasses import replace

from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.leaks.holdings import Holding
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.actions import Action, ActionKind, Outcome
from lightning_memtools.oom.recorded_history import EXPANDABLE
from lightning_memtools.oom.step_trials import NotCheckedError, StepTrials
from lightning_memtools.reporting.held_words import holding_in_words, is_cause, owners_in_words

IN_PIECES = 0.2
"""As a share of what is reserved: so much that is free in pieces is fragmentation."""
_MOST_HOLDERS = 5
_LEAST_SHARE = 0.01  # of what is allocated
_LARGE_SHARE = 0.2  # of the device: another process that holds so much is a cause
_MOST_PARTS = 8  # of OOMRecovery

RELEASE = Action(kind=ActionKind.HOLDER, title="Delete or detach what is held")
ONE_COPY = Action(
    kind=ActionKind.GARBAGE,
    title="Keep one copy on the device",
    code='torch.load(path, map_location="cpu")',
)
COLLECT_GARBAGE = Action(kind=ActionKind.GARBAGE, title="Collect garbage", code="gc.collect()")
FIND_GROWTH = Action(kind=ActionKind.GROWTH, title="Find what grows from batch to batch")
RUN_IN_PARTS = Action(
    kind=ActionKind.RARE_BATCH, title="Run the rare large batch in parts", code='OOMRecovery(loss="mean")'
)
EXPAND_SEGMENTS = Action(kind=ActionKind.EXPANDABLE_SEGMENTS, title="Use expandable segments", code=EXPANDABLE)
STOP_PROCESSES = Action(kind=ActionKind.STOP_PROCESS, title="Stop other processes on the device")
KEEP_NO_PREDICTIONS = Action(
    kind=ActionKind.PREDICTIONS,
    title="Keep no predictions on the device",
    code="trainer.predict(return_predictions=False)",
)


def _without(trials: StepTrials, n_bytes: int, what: str) -> tuple[Outcome, str]:
    """Return the outcome of freeing so many bytes, and a sentence that says whether the step then fits."""
    if trials.why_not:
        why = f"Whether the step fits without {what} is not known: it could not be traced ({trials.why_not})"
        return Outcome.MAY_BE_ENOUGH, why
    fits = trials.plain_fits_with(n_bytes)
    words = {True: "fits", False: "does not fit yet", None: "may or may not fit"}[fits]
    return Outcome.of(fits=fits), f"Without {what}, the traced step {words}"


def release(trials: StepTrials) -> list[Action]:
    """Let go of what the run, or what is left of another one, holds beside the model and its optimizers."""
    allocated = trials.failed.facts.stats.allocated or 0
    least = _LEAST_SHARE * allocated
    held = [holding for holding in trials.failed.held.found if holding.n_bytes > least][:_MOST_HOLDERS]
    actions = []
    for holding in held:
        outcome, detail = _without(trials, holding.n_bytes, "it")
        action = replace(
            RELEASE,
            title=f"{_verb(holding)} {holding_in_words(holding)}",
            outcome=outcome,
            detail=". ".join(filter(None, [_how(holding), detail])),
            saved=holding.n_bytes,
            cause=_cause(holding) if is_cause(holding, allocated) else "",
        )
        actions.append(action)
    return actions


def _verb(holding: Holding) -> str:
    if holding.owners:
        return "Delete what is left of another run:" if holding.is_left_over else "Keep on the host, or do without:"
    return "Delete or detach" if holding.piles_up else "Keep on the host, if it is not needed here:"


def _how(holding: Holding) -> str:
    if holding.is_left_over:
        return "Something still refers to it; `del` that, and let `gc.collect()` run, before the next run begins"
    if not holding.piles_up:
        return ""
    how = "`.detach().cpu()`" if holding.finding.with_graph else "`.cpu()`"
    return f"Keep numbers, or tensors on the host ({how}), and clear it when the epoch ends"


def _cause(holding: Holding) -> str:
    size = format_size(holding.n_bytes)
    if holding.is_left_over:
        return f"`{holding.path}` keeps {owners_in_words(holding)} of another run alive, {size}"
    return f"`{holding.path}` holds {size}"


def two_copies(trials: StepTrials) -> list[Action]:
    """Load or save a checkpoint through the host: memory ran out while two copies of the weights were there."""
    split = trials.failed.facts.split
    assert split is not None
    once = split.by_category["parameters"] + split.by_category["optimizer"]
    size, twice = format_size(once), format_size(2 * once)
    verb = "loaded" if "load" in trials.failed.facts.moment.hook else "saved"
    action = replace(
        ONE_COPY,
        title=f"{ONE_COPY.title}: memory ran out while a checkpoint was {verb}",
        outcome=Outcome.MAY_BE_ENOUGH,
        detail=f"Weights and optimizer state take {size} on the device, and two copies of them {twice}. A tensor that "
        "is loaded goes to the device that it was saved from, and an optimizer's load_state_dict puts its state where "
        "the parameters are",
        saved=once,
        cause=f"A checkpoint was being {verb}: two copies of weights and optimizer state take {twice}",
    )
    return [action]


def garbage(trials: StepTrials) -> list[Action]:
    """Collect objects that refer to each other, and to which nothing else refers."""
    n_bytes = trials.failed.held.garbage_bytes
    outcome, detail = _without(trials, n_bytes, "it")
    size = format_size(n_bytes)
    action = replace(
        COLLECT_GARBAGE,
        title=f"Collect garbage: {size} were held by objects that refer to each other, and that nobody uses",
        outcome=outcome,
        detail=f"Python frees such objects at times of its own. Collect them after a run, before the next one, or "
        f"break the cycle of references. {detail}",
        saved=n_bytes,
        cause=f"Garbage that Python had not collected held {size}",
    )
    return [action]


def growth(trials: StepTrials) -> list[Action]:
    """Free memory that has accumulated over the batches, and of which no holder was found."""
    grown = trials.failed.facts.grown
    assert grown is not None
    outcome, detail = _without(trials, grown.n_bytes, "this memory")
    each = format_size(grown.n_bytes // grown.n_batches)
    action = replace(
        FIND_GROWTH,
        title=f"Find what grows by {each} a batch",
        outcome=outcome,
        detail=f"In {grown.n_batches} batches, {format_size(grown.n_bytes)} have accumulated that belong neither to "
        "the model nor to its optimizers or inputs. The usual cause is losses or outputs that are kept with their "
        f"graph (use `.detach()`). {detail}",
        saved=grown.n_bytes,
        cause=f"Memory grew by {each} in each batch",
    )
    return [action]


def rare_batch(trials: StepTrials) -> list[Action]:
    """Run a batch in parts that is far larger than those before it."""
    facts = trials.failed.facts
    before, can_split = facts.before, not trials.failed.run.no_recovery
    assert before is not None
    largest = _shapes_of(before.batch)
    shapes, n_before = _shapes_of(facts.batch), f"{before.n_batches:,} before it"
    odd = f"The batch, {shapes}, is {before.times:.3g} times as large as any of the {n_before}"
    outcome, how = _in_parts(trials)
    action = replace(
        RUN_IN_PARTS,
        title=RUN_IN_PARTS.title if can_split else "Keep batches alike: this one is far larger",
        code=RUN_IN_PARTS.code if can_split else "",
        outcome=outcome,
        detail=f"{odd} (at most {largest}). {how}. To keep batches alike, sort or bucket samples by their "
        f"length, or cap it: the largest before was {largest}",
        cause=f"{odd}, which were at most {largest}",
    )
    return [action]


def _in_parts(trials: StepTrials) -> tuple[Outcome, str]:
    """Return the outcome of running the batch in parts, and a sentence on that."""
    if trials.failed.run.no_recovery:
        return Outcome.MAY_BE_ENOUGH, trials.failed.run.no_recovery
    if trials.why_not or trials.limit is None:
        return Outcome.MAY_BE_ENOUGH, "OOMRecovery runs a batch that does not fit in parts, and the others whole"
    n_parts = 2
    while n_parts <= min(_MOST_PARTS, trials.size):
        if trials.fits(trials.at(-(-trials.size // n_parts))):
            how = f"OOMRecovery runs such a batch in parts, and the others whole: in {n_parts} parts it fits"
            return Outcome.ENOUGH, how
        n_parts *= 2
    return Outcome.NOT_ENOUGH, f"OOMRecovery runs such a batch in parts, but in {_MOST_PARTS} it does not fit either"


def _shapes_of(batch: object) -> str:
    """Return the shape of a batch's largest tensor, such as "[16, 900, 64]"."""
    tensors = sorted(tensors_in(batch), key=lambda tensor: -tensor.numel() * tensor.element_size())
    return str(list(tensors[0].shape)) if tensors else "no tensors"


def expandable_segments(trials: StepTrials) -> list[Action]:
    """Use expandable segments: would the request, and the whole step, have found memory?"""
    failed = trials.failed
    if failed.config.expandable_segments:
        return []
    if failed.history is None:
        raise NotCheckedError("no history of allocations was recorded")
    verdict = failed.history.with_expandable_segments()
    if verdict.served is None:
        raise NotCheckedError(verdict.why)
    detail = f"In a replay of the recorded allocations, {verdict.why}"
    if not verdict.served:
        return [replace(EXPAND_SEGMENTS, outcome=Outcome.USELESS, detail=detail)]
    if trials.why_not or failed.usable is None:
        detail += ". Whether the rest of the step would fit is not known"
        return [replace(EXPAND_SEGMENTS, outcome=Outcome.REQUEST_ONLY, detail=detail)]
    plain = trials.plain
    config = replace(plain.trace.config, expandable_segments=True)
    peak, usable = format_size(plain.peak_allocated), format_size(failed.usable)
    if not replay(plain.trace, config=config, capacity=failed.usable).completed:
        detail += f". The whole step does not fit: its peak is {peak}, and {usable} are available"
        return [replace(EXPAND_SEGMENTS, outcome=Outcome.USELESS, detail=detail)]
    detail += f". The whole step fits, with a peak of {peak} within the available {usable}"
    unusable, reserved = failed.facts.unusable or 0, failed.facts.stats.reserved or 0
    cause = ""
    if unusable >= IN_PIECES * reserved:
        pieces = f"{format_size(unusable)} of the {format_size(reserved)} that are reserved"
        cause = f"{pieces} lay in pieces (fragmentation)"
    return [replace(EXPAND_SEGMENTS, outcome=Outcome.ENOUGH, detail=detail, cause=cause)]


def processes(trials: StepTrials) -> list[Action]:
    """Stop one of the other processes: is the memory that it holds enough?"""
    others, capacity = trials.failed.processes, trials.failed.facts.stats.capacity or 0
    if isinstance(others, str):
        raise NotCheckedError(f"the other processes are {others}")
    actions = []
    for process in others or ():
        n_bytes = process.used_bytes or 0
        if n_bytes:
            name = f"{process.name or 'process'} (pid {process.pid})"
            cause = f"{process.name or 'Process'} (pid {process.pid}) holds {format_size(n_bytes)}"
            cause = cause if n_bytes > _LARGE_SHARE * capacity else ""
            stop = replace(STOP_PROCESSES, title=f"Stop {name}")
            actions.append(_freed(trials, stop, n_bytes, "It holds", cause))
    return actions


def predictions(trials: StepTrials) -> list[Action]:
    """Keep no predictions: is the memory that they hold enough?"""
    n_bytes = trials.failed.predictions
    cause = f"Predictions that are kept hold {format_size(n_bytes)}"
    return [_freed(trials, KEEP_NO_PREDICTIONS, n_bytes, "They hold", cause)]


def _freed(trials: StepTrials, action: Action, n_bytes: int, verb: str, cause: str) -> Action:
    """Return the action with whether the step fits into `n_bytes` more, by its trace and by the recorded history."""
    enough, history = trials.plain_fits_with(n_bytes), trials.failed.history
    if enough and history is not None:
        served = history.with_more_memory(n_bytes).served
        # Where a trace lacks what made the step fail, only the history can tell.
        enough = bool(served) if trials.plain_fits else served is not False
    whether = {True: "is enough", False: "is not enough by itself", None: "may or may not be enough"}[enough]
    detail = f"{verb} {format_size(n_bytes)}, which {whether}"
    cause = cause if enough else ""
    return replace(action, outcome=Outcome.of(fits=enough), detail=detail, saved=n_bytes, cause=cause)
