"""Advice that carrying out the recorded history again, or counting what others hold, gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.oom.actions import Action, Kind
from lightning_memtools.oom.fragmentation import Verdict, with_empty_cache, with_expandable_segments, with_more_memory
from lightning_memtools.oom.trials import NotFoundError, Trials

LET_SEGMENTS_GROW = Action(
    kind=Kind.EXPANDABLE_SEGMENTS, title="Let segments grow", code='PYTORCH_ALLOC_CONF="expandable_segments:True"'
)
EMPTY_THE_CACHE = Action(kind=Kind.EMPTY_CACHE, title="Empty the cache before evaluation", code="EmptyCache()")
STOP_PROCESSES = Action(kind=Kind.STOP_PROCESS, title="Stop other processes on the device")
KEEP_NO_PREDICTIONS = Action(
    kind=Kind.PREDICTIONS,
    title="Keep no predictions on the device",
    code="trainer.predict(return_predictions=False)",
)


def expandable_segments(trials: Trials) -> Iterator[Action]:
    """Whether they would have served the request, and the whole step."""
    history = trials.situation.history
    if history is None:
        raise NotFoundError("no history was recorded")
    config = replace(trials.situation.config, expandable_segments=True)

    def whole_step() -> tuple[MemoryEstimate, bool]:
        plain = trials.plain
        assert plain.trace is not None
        return plain, replay(plain.trace, config=config, capacity=trials.usable).completed

    verdict = with_expandable_segments(history)
    yield _of(trials, verdict, LET_SEGMENTS_GROW, whole_step)


def empty_cache(trials: Trials) -> Iterator[Action]:
    """Whether the request, and the whole step, would have been served without what training had cut up."""
    history, evaluation = trials.situation.history, trials.situation.evaluation_began
    if history is None or evaluation is None:
        raise NotFoundError("no history was recorded")

    def whole_step() -> tuple[MemoryEstimate, bool]:
        return trials.plain, trials.fits(trials.plain, emptied=True)

    verdict = with_empty_cache(history, evaluation)
    yield _of(trials, verdict, EMPTY_THE_CACHE, whole_step)


def processes(trials: Trials) -> Iterator[Action]:
    """Whether what each other process holds would be enough."""
    others = trials.situation.processes
    if isinstance(others, str):
        raise NotFoundError(f"they are {others}")
    for process in others or ():
        if process.used_bytes:
            stop = replace(STOP_PROCESSES, title=f"Stop {process.name or 'process'} (pid {process.pid})")
            yield _with_more_memory(trials, stop, process.used_bytes, "it holds")


def predictions(trials: Trials) -> Iterator[Action]:
    """Whether what predictions hold would be enough."""
    yield _with_more_memory(trials, KEEP_NO_PREDICTIONS, trials.situation.predictions, "they hold")


def _of(
    trials: Trials, verdict: Verdict, action: Action, whole_step: Callable[[], tuple[MemoryEstimate, bool]]
) -> Action:
    """One request was replayed; whether the rest of the step fits, a trace tells."""
    if verdict.served is None:
        raise NotFoundError(verdict.why)
    fits: bool | None = verdict.served
    detail = f"{verdict.why}, as a replay of the recorded history shows"
    if verdict.served and trials.why_not:
        fits = None
        detail += "; whether the rest of the step would fit is not known"
    elif verdict.served:
        estimate, fits = whole_step()
        detail += (
            f"; the whole step fits, with a peak of {trials.beside(estimate.peak_allocated)}"
            if fits
            else f"; for the whole step that is {trials.whether(estimate.peak_allocated, fits=False)}"
        )
    return replace(action, detail=detail, checked=True, fits=fits, saved=int(fits is None))


def _with_more_memory(trials: Trials, action: Action, n_bytes: int, verb: str) -> Action:
    """Whether the step fits with so much more: by its trace, and by the recorded history with all that lay about."""
    enough = trials.plain_fits_with(n_bytes)
    if enough and trials.situation.history is not None:
        served = with_more_memory(trials.situation.history, n_bytes).served
        # Where a trace lacks what made the step fail, only the history can tell.
        enough = bool(served) if trials.plain_fits else served is not False
    whether = {True: "is enough", False: "is not enough by itself", None: "may be enough or not"}
    detail = f"{verb} {format_size(n_bytes)}, which {whether[enough]}"
    return replace(action, detail=detail, checked=True, fits=enough, saved=n_bytes)
