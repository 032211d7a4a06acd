"""Checks of changes to the step: each changed step is traced, and compared with the memory that is available."""

from __future__ import annotations

from dataclasses import replace

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import BudgetTooSmallError
from lightning_memtools.estimate.memory_estimate import usable_bytes
from lightning_memtools.memory.sizes import MIB, format_size, known_gpus
from lightning_memtools.oom.actions import Action, ActionKind, Outcome
from lightning_memtools.oom.step_trials import NotCheckedError, StepTrials
from lightning_memtools.simulation.step_runner import PrecisionName

_BF16: PrecisionName = "bf16-mixed"
_STAGES = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}


def smaller_batch(trials: StepTrials) -> list[Action]:
    """Suggest the largest batch size that fits. If that is unknown, suggest half of the batch size that failed."""
    size, limit, stage = trials.size, trials.limit, _STAGES[trials.failed.stage or "train"]

    def batches_of(smaller: int) -> Action:
        title = f"Use {stage} batches of {smaller} instead of {size}"
        return Action(kind=ActionKind.BATCH_SIZE, title=title, code=f"DataLoader(batch_size={smaller})")

    if limit is None:
        half = size // 2
        return [_compared(trials, trials.at(half).peak_allocated, batches_of(half), fits=None)] if half else []
    largest = trials.largest_batch
    if not largest:
        return [Action(kind=ActionKind.BATCH_SIZE, title="Use smaller batches", detail="Not even one sample fits")]
    return [_fitting_batch(trials, batches_of(largest), trials.at(largest).peak_allocated, "The step then fits")]


def accumulation(trials: StepTrials) -> list[Action]:
    """Suggest gradient accumulation with the largest batch size that fits and keeps the effective batch size."""
    size, effective = trials.size, trials.size * trials.failed.run.accumulate
    most = size // 2 if trials.limit is None else min(trials.largest_batch, size - 1)
    for smaller in range(most, 0, -1):
        if effective % smaller:
            continue
        n_batches = effective // smaller
        estimate = trials.at(smaller, n_batches)
        fits, peak = trials.fits(estimate), estimate.peak_allocated
        if fits is False:
            continue
        action = Action(
            kind=ActionKind.ACCUMULATION,
            title=f"Accumulate gradients over {n_batches} batches of {smaller}",
            code=f"DataLoader(batch_size={smaller}), Trainer(accumulate_grad_batches={n_batches})",
        )
        if fits is None:
            return [_compared(trials, peak, action, fits=None)]
        return [_fitting_batch(trials, action, peak, f"The effective batch stays {effective}, and the step fits")]
    return []


def _fitting_batch(trials: StepTrials, action: Action, peak: int, how: str) -> Action:
    """Complete an action whose batch size fits. If the run uses checkpointing, suggest a memory budget for it, too."""
    detail = f"{how}, with a peak of {format_size(peak)} within the available {format_size(trials.limit)}"
    fitting = replace(action, outcome=Outcome.ENOUGH, detail=detail, saved=trials.saving(peak), peak=peak)
    if trials.failed.stage != "train" or trials.failed.run.plan is None:
        return fitting
    budget = -(-peak // MIB)
    note = "Without this budget, GradientCheckpointing plans anew for smaller batches, and may recompute less"
    code = f'{action.code}, GradientCheckpointing(memory_budget="{budget}MiB", ...)'
    return replace(fitting, code=code, detail=f"{detail}. {note}")


def checkpointing(trials: StepTrials) -> list[Action]:
    """Suggest GradientCheckpointing, with the checkpoint plan that it would make for the available memory.

    The plan's budget is the available memory, minus memory that the allocator reserves but no tensor uses.
    """
    trials.check_time()
    budget = None
    if trials.limit is not None:
        beside_tensors = trials.plain.peak_reserved - trials.plain.peak_allocated
        budget = max(1, (trials.limit - beside_tensors) // MIB)
    elif trials.failed.run.plan is not None:
        return []  # the plan that needs no budget is applied
    plan, given = _planned(trials, budget)
    return _recomputing(trials, plan, given)


def _planned(trials: StepTrials, budget: int | None) -> tuple[CheckpointPlan, str | None]:
    """Return a checkpoint plan for `budget` MiB, and the budget as text. If the budget is too small, raise it."""
    given = None if budget is None else f"{budget}MiB"
    try:
        return trials.planner.plan(CheckpointOptions.parse(memory_budget=given)), given
    except BudgetTooSmallError as error:
        return _planned(trials, -(-error.reachable_bytes // MIB))


def _recomputing(trials: StepTrials, plan: CheckpointPlan, given: str | None) -> list[Action]:
    """Try the checkpoint plan for the memory budget `given`, and suggest it; return [] if nothing is recomputed."""
    if plan.refused is not None:
        title = "Recompute activations in the backward pass"
        return [Action(kind=ActionKind.CHECKPOINTING, title=title, detail=plan.refused.rstrip("."))]
    if not any(chain.ranges for chain in plan.chains):
        return []  # the loss in chunks is advice of its own
    estimate, extra = trials.having(plan=plan), plan.extra_operations
    title = f"Recompute the activations of `{plan.recomputed()}` in the backward pass"
    title += ", and compute the loss in chunks" if plan.heads else ""
    argument = "" if given is None else f'memory_budget="{given}"'
    action = Action(kind=ActionKind.CHECKPOINTING, title=title, code=f"GradientCheckpointing({argument})")
    price = f"{extra:.0%} more computation" if extra >= 0.01 else "less than 1% more computation"  # noqa: PLR2004, 1%
    return [_compared(trials, estimate.peak_allocated, action, fits=trials.fits(estimate), price=price)]


def chunked_loss(trials: StepTrials) -> list[Action]:
    """Suggest computing a language model's loss in chunks, so that its full logits never exist at once."""
    chunked = trials.planner.in_chunks
    if chunked is None or not chunked.names:
        return []
    peak = chunked.cost.peak_bytes
    title, code = "Compute the loss without holding all logits at once", f'memory_budget="{-(-peak // MIB)}MiB"'
    action = Action(kind=ActionKind.LOSS, title=title, code=f"GradientCheckpointing({code})")
    compared = _compared(trials, peak, action, fits=None if trials.limit is None else peak <= trials.limit)
    return [replace(compared, detail=f"{chunked.size[0].upper()}{chunked.size[1:]}. {compared.detail}")]


def bfloat16(trials: StepTrials) -> list[Action]:
    """Suggest bfloat16 mixed precision."""
    estimate = trials.having(precision=_BF16)
    action = Action(kind=ActionKind.PRECISION, title="Compute in bfloat16", code=f'Trainer(precision="{_BF16}")')
    return [_compared(trials, estimate.peak_allocated, action, fits=trials.fits(estimate))]


def larger_gpu(trials: StepTrials) -> list[Action]:
    """Suggest the smallest known GPU on which the step fits."""
    if trials.limit is None:
        raise NotCheckedError("as far as a trace shows, the step fits on this one")
    plain = trials.plain
    for gpu in sorted(known_gpus(), key=lambda gpu: gpu.usable_bytes):
        usable = usable_bytes(gpu.name) - trials.failed.untraced
        if usable > trials.limit and plain.peak_allocated <= usable and plain.fits(f"{usable}B"):
            title = f"Use a larger GPU ({gpu.name})"
            detail = "It is the smallest known GPU on which this step fits unchanged"
            return [Action(kind=ActionKind.LARGER_GPU, title=title, outcome=Outcome.ENOUGH, detail=detail)]
    return []


def _compared(trials: StepTrials, peak: int, action: Action, *, fits: bool | None, price: str = "") -> Action:
    """Return the action with the result of its trial: the new peak, the bytes saved, whether it fits, the price."""
    saved = trials.saving(peak)
    if not saved:
        return replace(action, outcome=Outcome.USELESS, detail="It does not lower the peak", peak=peak)
    detail = f"the peak falls by {format_size(saved)} to {format_size(peak)}"
    detail = f"With {price}, {detail}" if price else f"T{detail[1:]}"
    if fits is None:
        detail += ". Whether that is enough is not known"
    elif fits:
        detail += f" and fits within the available {format_size(trials.limit)}"
    else:
        detail += f". That is not enough by itself: {format_size(trials.limit)} are available, in segments"
    return replace(action, outcome=Outcome.of(fits=fits), detail=detail, saved=saved, peak=peak, price=price)
