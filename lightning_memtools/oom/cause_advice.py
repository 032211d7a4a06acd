"""Advice on what made memory run out, beside the step itself: what is held, what grows, and a batch of an odd size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memtools.memory.leaks.holdings import Holding
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.report_page import Action, ActionKind
from lightning_memtools.oom.step_trials import StepTrials
from lightning_memtools.reporting.held_words import holding_in_words, is_cause, owners_in_words

RELEASE = Action(kind=ActionKind.HOLDER, title="Delete or detach what is held")
COLLECT_GARBAGE = Action(kind=ActionKind.GARBAGE, title="Collect garbage", code="gc.collect()")
FIND_GROWTH = Action(kind=ActionKind.GROWTH, title="Find what grows from batch to batch")
RUN_IN_PARTS = Action(
    kind=ActionKind.RARE_BATCH, title="Run the rare large batch in parts", code='OOMRecovery(loss="mean")'
)
ONE_COPY = Action(
    kind=ActionKind.GARBAGE,
    title="Keep one copy on the device",
    code='torch.load(path, map_location="cpu")',
)
_MOST_HOLDERS = 5
_LEAST_SHARE = 0.01
# OOMRecovery's `max_splits`.
_MOST_PARTS = 8


def _without(trials: StepTrials, n_bytes: int, what: str) -> tuple[bool | None, str]:
    """Return whether the step fits with so much more memory, and a sentence that says so."""
    if trials.why_not:
        return None, f"Whether the step fits without {what} is not known: it could not be traced ({trials.why_not})"
    fits = trials.plain_fits_with(n_bytes)
    without = {True: "the step fits", False: "the step does not fit yet", None: "the step may or may not fit"}
    return fits, f"Without {what}, {without[fits]}"


def release(trials: StepTrials) -> Iterator[Action]:
    """Letting go of what the run, or what is left of another one, holds beside the model and its optimizers."""
    allocated = trials.failed.facts.stats.allocated or 0
    least = _LEAST_SHARE * allocated
    found = [one for one in trials.failed.held.found if one.n_bytes > least][:_MOST_HOLDERS]
    causes = [one for one in found if is_cause(one, allocated)]
    together = sum(one.n_bytes for one in causes)
    for holding in found:
        fits, detail = _without(trials, holding.n_bytes, "it")
        if holding in causes and len(causes) > 1 and fits is False and trials.plain_fits_with(together):
            detail += f". Without all {len(causes)} of these, {format_size(together)}, it fits"
        yield replace(
            RELEASE,
            title=f"{_verb(holding)} {holding_in_words(holding)}",
            detail=". ".join(filter(None, [_how(holding), detail])),
            checked=True,
            fits=fits,
            saved=holding.n_bytes,
            is_cause=holding in causes,
            cause=_cause(holding),
        )


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


def garbage(trials: StepTrials) -> Iterator[Action]:
    """Collecting objects that refer to each other, and to which nothing else refers."""
    n_bytes = trials.failed.held.garbage_bytes
    fits, detail = _without(trials, n_bytes, "it")
    size = format_size(n_bytes)
    yield replace(
        COLLECT_GARBAGE,
        title=f"Collect garbage: {size} were held by objects that refer to each other, and that nobody uses",
        detail=f"Python frees such objects at times of its own. Collect them after a run, before the next one, or "
        f"break the cycle of references. {detail}",
        checked=True,
        fits=fits,
        saved=n_bytes,
        is_cause=True,
        cause=f"Garbage that Python had not collected held {size}",
    )


def growth(trials: StepTrials) -> Iterator[Action]:
    """Releasing memory that has accumulated over the batches, where nothing was found that holds it."""
    grown = trials.failed.facts.grown
    assert grown is not None
    fits, detail = _without(trials, grown.n_bytes, "this memory")
    each = format_size(grown.n_bytes // grown.n_batches)
    yield replace(
        FIND_GROWTH,
        title=f"Find what grows by {each} a batch",
        detail=f"In {grown.n_batches} batches, {format_size(grown.n_bytes)} have accumulated that belong neither to "
        "the model nor to its optimizers or inputs. The usual cause is losses or outputs that are kept with their "
        f"graph (use `.detach()`). {detail}",
        checked=True,
        fits=fits,
        saved=grown.n_bytes,
        is_cause=True,
        cause=f"Memory grew by {each} in each batch",
    )


def two_copies(trials: StepTrials) -> Iterator[Action]:
    """Loading a checkpoint to the host: what two copies of weights and optimizer state take."""
    split = trials.failed.facts.split
    assert split is not None
    weights, state = split.by_category["parameters"], split.by_category["optimizer"]
    size, twice = format_size(weights + state), format_size(2 * (weights + state))
    verb = "loaded" if "load" in trials.failed.facts.moment.hook else "saved"
    yield replace(
        ONE_COPY,
        title=f"{ONE_COPY.title}: memory ran out while a checkpoint was {verb}",
        detail=f"Weights and optimizer state take {size} on the device, and two copies of them {twice}. A tensor that "
        "is loaded goes to the device that it was saved from, and an optimizer's load_state_dict puts its state where "
        "the parameters are",
        checked=True,
        saved=max(1, weights + state),
        is_cause=True,
        cause=f"A checkpoint was being {verb}: two copies of weights and optimizer state take {twice}",
    )


def rare_batch(trials: StepTrials) -> Iterator[Action]:
    """If the batch is far larger than those before it: run it in parts."""
    failed = trials.failed
    before = failed.facts.before
    assert before is not None
    now, largest = shapes_of(failed.facts.batch), shapes_of(before.batch)
    odd = f"The batch, {now}, is {before.times:.3g} times as large as any of the {before.n_batches:,} before it"
    other = (
        f"To keep batches alike, sort or bucket samples by their length, or cap it: the largest before was {largest}"
    )
    parts, how = _parts(trials)
    can_split = not failed.run.no_recovery and failed.run.max_splits == 1
    yield replace(
        RUN_IN_PARTS,
        detail=f"{odd} (at most {largest}). {how}. {other}",
        title=RUN_IN_PARTS.title if can_split else "Keep batches alike: this one is far larger",
        code=RUN_IN_PARTS.code if can_split else "",
        checked=True,
        fits=parts,
        saved=trials.missing if parts else 1,
        is_cause=True,
        cause=f"{odd}, which were at most {largest}",
    )


def _parts(trials: StepTrials) -> tuple[bool | None, str]:
    """Return whether the batch fits in parts, and a sentence on that."""
    if trials.failed.run.max_splits > 1:
        return None, f"OOMRecovery did not run it in up to {trials.failed.run.max_splits} parts"
    if trials.failed.run.no_recovery:
        return None, f"OOMRecovery would not split it: {trials.failed.run.no_recovery}"
    if trials.why_not or not trials.can_tell_what_fits:
        return None, "OOMRecovery runs a batch that does not fit in parts, and the others whole"
    n_parts = 2
    while n_parts <= min(_MOST_PARTS, trials.size):
        if trials.fits(trials.at(-(-trials.size // n_parts))):
            return True, f"OOMRecovery runs such a batch in parts, and the others whole: in {n_parts} parts it fits"
        n_parts *= 2
    return False, f"OOMRecovery runs such a batch in parts, but in {_MOST_PARTS} it does not fit either"


def shapes_of(batch: object) -> str:
    """Return the shapes of a batch's largest tensors, such as "[16, 900, 64]"."""
    tensors = sorted(tensors_in(batch), key=lambda one: -one.numel() * one.element_size())
    return str(list(tensors[0].shape)) if tensors else "no tensors"
