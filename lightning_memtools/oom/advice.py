"""The advice of a report: each function tries one change of the failed step and yields the actions that it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.memory_estimate import DeviceLimit
from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.sizes import MIB, format_size, known_gpus
from lightning_memtools.oom.fragmentation import EXPANDABLE, IN_PIECES, changed, settings_that_serve
from lightning_memtools.oom.other_optimizers import fused_form, smaller_states
from lightning_memtools.oom.plan_trials import LEAST_PRICE
from lightning_memtools.oom.recorded_history import (
    ReplayVerdict,
    with_empty_cache,
    with_expandable_segments,
    with_more_memory,
)
from lightning_memtools.oom.report_page import Action, ActionKind
from lightning_memtools.oom.step_trials import NotFoundError, StepTrials
from lightning_memtools.reporting.phrases import first_of, in_series
from lightning_memtools.simulation.step_runner import PrecisionName

BF16: PrecisionName = "bf16-mixed"
NO_HISTORY = "no history of allocations was recorded"
# Of the device: another process that holds so much is a cause.
_LARGE_SHARE = 0.2
# Another optimizer changes the result of training: what saves a smaller share of what is missing is no advice.
_LEAST_OF_MISSING = 0.01
_STAGES = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}

SMALLER_BATCHES = Action(kind=ActionKind.BATCH_SIZE, title="Use smaller batches")
ACCUMULATE = Action(
    kind=ActionKind.ACCUMULATION,
    title="Accumulate gradients over smaller batches",
    code="Trainer(accumulate_grad_batches=...)",
)
RECOMPUTE = Action(
    kind=ActionKind.CHECKPOINTING,
    title="Recompute activations in the backward pass",
    code="GradientCheckpointing()",
)
CHUNK_THE_LOSS = Action(
    kind=ActionKind.LOSS,
    title="Compute the loss without holding all logits at once",
    code="GradientCheckpointing(memory_budget=...)",
)
OFFLOAD = Action(kind=ActionKind.OFFLOAD, title="Keep activations in host memory until the backward pass needs them")
BFLOAT16 = Action(kind=ActionKind.PRECISION, title="Compute in bfloat16", code=f'Trainer(precision="{BF16}")')
SMALLER_STATE = Action(kind=ActionKind.OPTIMIZER, title="Use an optimizer with a smaller state")
LARGER_GPU = Action(kind=ActionKind.LARGER_GPU, title="Use a larger GPU")
USE_EXPANDABLE_SEGMENTS = Action(
    kind=ActionKind.EXPANDABLE_SEGMENTS,
    title="Use expandable segments",
    code='PYTORCH_ALLOC_CONF="expandable_segments:True"',
)
USE_SETTING = Action(kind=ActionKind.EXPANDABLE_SEGMENTS, title="Use other settings of the allocator")
EMPTY_THE_CACHE = Action(kind=ActionKind.EMPTY_CACHE, title="Empty the cache before evaluation", code="EmptyCache()")
STOP_PROCESSES = Action(kind=ActionKind.STOP_PROCESS, title="Stop other processes on the device")
KEEP_NO_PREDICTIONS = Action(
    kind=ActionKind.PREDICTIONS,
    title="Keep no predictions on the device",
    code="trainer.predict(return_predictions=False)",
)


# --- by replaying the recorded history, or counting what others hold


def expandable_segments(trials: StepTrials) -> Iterator[Action]:
    """Expandable segments: whether the request, and the whole step, would have found memory."""
    history = trials.failed.history
    if history is None:
        raise NotFoundError(NO_HISTORY)
    yield _with_setting(trials, EXPANDABLE, with_expandable_segments(history), USE_EXPANDABLE_SEGMENTS)


def allocator_settings(trials: StepTrials) -> Iterator[Action]:
    """Other settings of the allocator, where expandable segments do not serve: the first that makes the step fit."""
    history = trials.failed.history
    assert history is not None
    if with_expandable_segments(history).served:
        return
    tried: list[str] = []
    for setting, verdict in settings_that_serve(history, trials.check_time):
        if setting == EXPANDABLE:
            continue
        tried.append(setting)
        if verdict.served:
            action = replace(USE_SETTING, title=f"Set {setting}", code=f'PYTORCH_ALLOC_CONF="{setting}"')
            yield _with_setting(trials, setting, verdict, action)
            return
    yield replace(
        USE_SETTING,
        detail=f"In a replay of the recorded allocations, none of {in_series(tried)} serves the request",
        checked=True,
        fits=False,
    )


def _with_setting(trials: StepTrials, setting: str, verdict: ReplayVerdict, action: Action) -> Action:
    """Return the action that changes a setting of the allocator; one against the cause if much memory lay in pieces."""

    def whole_step() -> tuple[MemoryEstimate, bool]:
        plain = trials.plain
        assert plain.trace is not None
        config = changed(plain.trace.config, setting)
        return plain, replay(plain.trace, config=config, capacity=trials.usable).completed

    action = _of(trials, verdict, action, whole_step)
    facts = trials.failed.facts
    unusable, reserved = facts.unusable or 0, facts.stats.reserved or 0
    if not action.fits or unusable < IN_PIECES * reserved:
        return action
    cause = f"{format_size(unusable)} of the {format_size(reserved)} that are reserved lay in pieces (fragmentation)"
    return replace(action, is_cause=True, cause=cause)


def empty_cache(trials: StepTrials) -> Iterator[Action]:
    """An empty cache: whether the request, and the whole step, would have found memory without training's fragments."""
    history, evaluation = trials.failed.history, trials.failed.evaluation_began
    if history is None or evaluation is None:
        raise NotFoundError(NO_HISTORY)

    def whole_step() -> tuple[MemoryEstimate, bool]:
        return trials.plain, trials.fits(trials.plain, emptied=True)

    verdict = with_empty_cache(history, evaluation)
    made = _of(trials, verdict, EMPTY_THE_CACHE, whole_step)
    cause = "Evaluation found no room beside the segments that training left in the cache"
    yield replace(made, is_cause=True, cause=cause) if made.fits else made


def processes(trials: StepTrials) -> Iterator[Action]:
    """Stopping one of the other processes: whether the memory it holds would be enough."""
    others = trials.failed.processes
    if isinstance(others, str):
        raise NotFoundError(f"the other processes are {others}")
    for process in others or ():
        if process.used_bytes:
            stop = replace(STOP_PROCESSES, title=f"Stop {process.name or 'process'} (pid {process.pid})")
            made = _with_more_memory(trials, stop, process.used_bytes, "It holds")
            much = process.used_bytes > _LARGE_SHARE * (trials.failed.facts.stats.capacity or 0)
            cause = f"{process.name or 'Process'} (pid {process.pid}) holds {format_size(process.used_bytes)}"
            yield replace(made, is_cause=True, cause=cause) if made.fits and much else made


def predictions(trials: StepTrials) -> Iterator[Action]:
    """Keeping no predictions: whether the memory they hold would be enough."""
    made = _with_more_memory(trials, KEEP_NO_PREDICTIONS, trials.failed.predictions, "They hold")
    cause = f"Predictions that are kept hold {format_size(trials.failed.predictions)}"
    yield replace(made, is_cause=True, cause=cause) if made.fits else made


def _of(
    trials: StepTrials, verdict: ReplayVerdict, action: Action, whole_step: Callable[[], tuple[MemoryEstimate, bool]]
) -> Action:
    """Return the action after one request was replayed; a trace tells whether the rest of the step fits."""
    if verdict.served is None:
        raise NotFoundError(verdict.why)
    fits: bool | None = verdict.served
    is_partial = False
    detail = f"In a replay of the recorded allocations, {verdict.why}"
    if verdict.served and trials.why_not:
        fits, is_partial = None, True
        detail += ". Whether the rest of the step would fit is not known"
    elif verdict.served:
        estimate, fits = whole_step()
        peak = estimate.peak_allocated
        detail += (
            f". The whole step fits, with a peak of {trials.within(peak)}"
            if fits
            else f". The whole step does not fit: its peak is {format_size(peak)}, and {trials.obstacle(peak)}"
        )
    return replace(action, detail=detail, checked=True, fits=fits, saved=int(is_partial), is_partial=is_partial)


def _with_more_memory(trials: StepTrials, action: Action, n_bytes: int, verb: str) -> Action:
    """Return the action with whether the step fits into `n_bytes` more, by its trace and by the recorded history."""
    enough = trials.plain_fits_with(n_bytes)
    if enough and trials.failed.history is not None:
        served = with_more_memory(trials.failed.history, n_bytes).served
        # Where a trace lacks what made the step fail, only the history can tell.
        enough = bool(served) if trials.plain_fits else served is not False
    whether = {True: "is enough", False: "is not enough by itself", None: "may or may not be enough"}
    detail = f"{verb} {format_size(n_bytes)}, which {whether[enough]}"
    return replace(action, detail=detail, checked=True, fits=enough, saved=n_bytes)


# --- by tracing the step under other circumstances


def smaller_batch(trials: StepTrials) -> Iterator[Action]:
    """The largest batch that fits; half of the failed one where a trace cannot tell what fits."""
    size = trials.size

    def of(smaller: int) -> Action:
        title = f"Use {_STAGES[trials.failed.stage or 'train']} batches of {smaller} instead of {size}"
        return replace(SMALLER_BATCHES, title=title, code=loader_code(smaller))

    if not trials.can_tell_what_fits:
        if size > 1:
            half = max(size // 2, min(2, size - 1))  # BatchNorm refuses to train on one sample
            yield compared(trials, trials.at(half), of(half))
        return
    found = trials.largest_batch
    if found.estimate is None:
        detail = f"Not even one sample fits{_of_other_lengths(trials)}"
        yield replace(SMALLER_BATCHES, detail=detail, checked=True, fits=False)
        return
    peak = found.estimate.peak_allocated
    smaller = replace(
        of(found.size),
        detail=f"The step then fits, with a peak of {trials.within(peak)}. {found.end}{_of_other_lengths(trials)}",
        checked=True,
        fits=True,
        saved=trials.saving(peak),
        peak=peak,
    )
    if trials.failed.run.max_splits > 1:
        n_parts = -(-size // found.size)
        parts = f"OOMRecovery(loss=..., max_splits={n_parts}) would run the batch in parts of that size"
        smaller = replace(smaller, detail=f"{smaller.detail}. {parts}")
    yield _with_the_same_plan(trials, smaller, peak)


def _of_other_lengths(trials: StepTrials) -> str:
    """Return a remark on tensors of the batch that a smaller traced batch does not make smaller."""
    lengths = {tensor.shape[0] for tensor in tensors_in(trials.failed.facts.batch) if tensor.dim()}
    others = sorted(lengths - {trials.size, 1})
    if not others:
        return ""
    return (
        f". Parts of the batch with other first dimensions ({first_of(others)}) were left as they are: reduce them too"
    )


def accumulation(trials: StepTrials) -> Iterator[Action]:
    """Gradient accumulation over the largest batch that fits and divides the effective batch."""
    size, effective = trials.size, trials.size * trials.failed.run.accumulate
    most = trials.largest_batch.size if trials.can_tell_what_fits else size // 2
    for smaller in (n for n in range(min(most, size - 1), 0, -1) if effective % n == 0):
        try:
            estimate = trials.at(smaller, effective // smaller)
        except ValueError:
            if smaller > 1:
                raise
            return  # BatchNorm refuses to train on one sample
        fits = trials.fits_if_known(estimate)
        if fits is False:
            continue
        action = replace(
            ACCUMULATE,
            title=f"Accumulate gradients over {effective // smaller} batches of {smaller}",
            code=f"{loader_code(smaller)}, Trainer(accumulate_grad_batches={effective // smaller})",
        )
        if fits is None:
            yield compared(trials, estimate, action)
        else:
            peak = estimate.peak_allocated
            fits_how = f"the step fits, with a peak of {trials.within(peak)}"
            fitting = replace(
                action,
                detail=f"The effective batch stays {effective}, and {fits_how}",
                checked=True,
                fits=True,
                saved=trials.saving(peak),
                peak=peak,
            )
            yield _with_the_same_plan(trials, fitting, peak)
        return


def _with_the_same_plan(trials: StepTrials, action: Action, peak: int) -> Action:
    """Return the action with the memory budget that the traced checkpoint plan takes, if one is applied."""
    if trials.failed.stage != "train" or trials.failed.run.plan is None:
        return action
    budget = -(-peak // MIB)
    note = "Without this budget, GradientCheckpointing plans anew for smaller batches, and may recompute less"
    return replace(
        action,
        code=f'{action.code}, GradientCheckpointing(memory_budget="{budget}MiB", ...)',
        detail=f"{action.detail.rstrip('.')}. {note}",
    )


def checkpointing(trials: StepTrials) -> Iterator[Action]:
    """The plan with the least recomputation that fits; without one, what GradientCheckpointing() chooses by itself."""
    is_applied = trials.failed.run.plan is not None
    found = None if is_applied else _chosen_plan(trials)
    try:
        found = _least_recomputation(trials) or found
    except Exception:  # such as the end of the time for checks: the plan that was found first is advice all the same
        if found is None:
            raise
    if found is None and is_applied:
        title = "Recompute more activations than now"
        detail = "No plan was found with which the step fits"
        found = replace(RECOMPUTE, title=title, code="", detail=detail, checked=True, fits=False)
    if found is not None:
        yield found


def _chosen_plan(trials: StepTrials) -> Action | None:
    plan, code = trials.plans.best.plan, trials.plans.best.code
    if _recomputes_nothing(plan):
        return None
    if plan.refused is not None:
        return replace(RECOMPUTE, code="", detail=plan.refused.rstrip("."), checked=True, fits=False)
    assert plan.peak_bytes is not None
    if trials.can_tell_what_fits and plan.peak_bytes > trials.usable:
        # The plan's own trace shows that it is not enough. Another one would only add what the allocator reserves.
        return with_peak(trials, plan.peak_bytes, _recompute(plan, code), fits=False, price=_price(plan))
    return compared(trials, trials.estimate_with_plan(plan), _recompute(plan, code), price=_price(plan))


def _least_recomputation(trials: StepTrials) -> Action | None:
    planned = trials.plans.that_fits() if trials.can_tell_what_fits else None
    if planned is None or planned.estimate is None or planned.plan.refused is not None:
        return None
    if _recomputes_nothing(planned.plan):
        return None
    action = _recompute(planned.plan, planned.code)
    return compared(trials, planned.estimate, action, price=_price(planned.plan))


def chunked_loss(trials: StepTrials) -> Iterator[Action]:
    """The loss of a language model in chunks, so that its logits never exist as a whole."""
    plan = trials.failed.run.plan
    found = trials.plans.in_chunks
    if found is None or not found.names:
        return
    peak = found.cost.peak_bytes
    given = f'memory_budget="{-(-peak // MIB)}MiB"' if plan is None else 'loss_head="auto"'
    action = replace(CHUNK_THE_LOSS, code=f"GradientCheckpointing({given})")
    made = with_peak(trials, peak, action, fits=peak <= trials.usable if trials.can_tell_what_fits else None)
    yield replace(made, detail=f"{found.size[0].upper()}{found.size[1:]}. {made.detail}")


def offload(trials: StepTrials) -> Iterator[Action]:
    """The plan that takes least time with activations in host memory, by a model of the time."""
    if not trials.can_tell_what_fits:
        return
    planned = trials.plans.with_offload()
    if planned is None or not planned.plan.host_bytes or planned.plan.peak_bytes is None:
        return
    time = planned.plan.relative_time or 1.0
    price = f"{time - 1:.0%} more time, as estimated"
    action = replace(OFFLOAD, code=planned.code)
    yield compared(trials, trials.estimate_with_plan(planned.plan), action, price=price)


def precision(trials: StepTrials) -> Iterator[Action]:
    """Computation in bfloat16."""
    yield compared(trials, trials.failed.estimate(precision=BF16), BFLOAT16)


def optimizer(trials: StepTrials) -> Iterator[Action]:
    """Optimizers with smaller states; the fused form of the present one where the peak is in its step."""
    optimizers = trials.failed.run.optimizers
    if len(optimizers) != 1:
        return
    others = list(smaller_states(optimizers[0]))
    fused = fused_form(optimizers[0]) if trials.failed.may_fuse else None
    if fused is not None and trials.plain.peak_at.phase == "optimizer":
        others.append(fused)
    for other in others:
        action = replace(SMALLER_STATE, title=other.title, code=other.code)
        made = compared(trials, trials.failed.estimate(optimizer=other.make), action)
        if made.saved < _LEAST_OF_MISSING * trials.missing:
            continue
        yield replace(made, detail=made.detail + (f". {other.note}" if other.note else ""))


def larger_gpu(trials: StepTrials) -> Iterator[Action]:
    """The smallest known GPU on which the step fits."""
    if not trials.can_tell_what_fits:
        raise NotFoundError("as far as a trace shows, the step fits on this one")
    plain = trials.plain
    for gpu in sorted(known_gpus(), key=lambda gpu: gpu.usable_bytes):
        usable = DeviceLimit.parse(gpu.name).usable - trials.failed.untraced
        if usable > trials.usable and plain.peak_allocated <= usable and plain.fits(f"{usable}B"):
            yield replace(
                LARGER_GPU,
                title=f"{LARGER_GPU.title} ({gpu.name})",
                detail="It is the smallest known GPU on which this step fits unchanged",
                checked=True,
                fits=True,
            )
            return


def compared(trials: StepTrials, estimate: MemoryEstimate, action: Action, *, price: str = "") -> Action:
    """Return the action with how much lower the changed step's peak is, and whether that is enough."""
    fits = trials.fits_if_known(estimate) if trials.saving(estimate.peak_allocated) else False
    return with_peak(trials, estimate.peak_allocated, action, fits=fits, price=price)


def with_peak(trials: StepTrials, peak: int, action: Action, *, fits: bool | None, price: str = "") -> Action:
    """Return the action with the step's peak."""
    saved = trials.saving(peak)
    if not saved:
        return replace(action, detail="It does not lower the peak", checked=True, fits=False, peak=peak)
    detail = trials.verdict(peak, fits=fits, price=price)
    return replace(action, detail=detail, checked=True, fits=fits, saved=saved, peak=peak, price=price)


def _recomputes_nothing(plan: CheckpointPlan) -> bool:
    """Return whether a plan only computes the loss in chunks, which is advice of its own."""
    return bool(plan.heads) and not any(chain.ranges for chain in plan.chains)


def _recompute(plan: CheckpointPlan, code: str) -> Action:
    title = f"Recompute the activations of `{plan.recomputed()}` in the backward pass"
    if plan.heads:
        title += ", and compute the loss in chunks"
    return replace(RECOMPUTE, title=title, code=code)


def _price(plan: CheckpointPlan) -> str:
    extra = plan.extra_operations
    return f"{extra:.0%} more computation" if extra >= LEAST_PRICE else "less than 1% more computation"


def loader_code(size: int) -> str:
    """Return the code that sets a batch size."""
    return f"DataLoader(batch_size={size})"
