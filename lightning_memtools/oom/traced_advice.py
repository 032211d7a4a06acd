"""Advice that tracing the step under other circumstances gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.estimate import MemoryEstimate
from lightning_memtools.estimate.memory_estimate import DeviceLimit
from lightning_memtools.memory.sizes import format_size, known_gpus
from lightning_memtools.oom.actions import Action, Kind
from lightning_memtools.oom.trials import NotFoundError, Trials
from lightning_memtools.simulation.precision import PrecisionName

_BF16: PrecisionName = "bf16-mixed"
_STAGES = {"train": "training", "val": "validation", "test": "test", "predict": "prediction"}
_LEAST_PRICE = 0.01

FIND_GROWTH = Action(kind=Kind.GROWTH, title="Find what grows from batch to batch")
SMALLER_BATCHES = Action(kind=Kind.BATCH_SIZE, title="Use smaller batches")
ACCUMULATE = Action(
    kind=Kind.ACCUMULATION,
    title="Accumulate gradients over smaller batches",
    code="Trainer(accumulate_grad_batches=...)",
)
RECOMPUTE = Action(kind=Kind.CHECKPOINTING, title="Recompute activations", code="GradientCheckpointing()")
BFLOAT16 = Action(kind=Kind.PRECISION, title="Compute in bfloat16", code=f'Trainer(precision="{_BF16}")')
SMALLER_STATE = Action(kind=Kind.OPTIMIZER, title="Use an optimizer with a smaller state")
LARGER_GPU = Action(kind=Kind.LARGER_GPU, title="Use a larger GPU")


def smaller_batch(trials: Trials) -> Iterator[Action]:
    """The largest batch that fits; half of the failed one where a trace cannot tell what fits."""
    size = trials.size

    def of(smaller: int) -> Action:
        title = f"Use {_STAGES[trials.situation.stage or 'train']} batches of {smaller} in place of {size}"
        return replace(SMALLER_BATCHES, title=title, code=_loader(smaller))

    if not trials.can_tell_what_fits:
        if size > 1:
            yield compared(trials, trials.at(size // 2), of(size // 2))
        return
    found = trials.largest_batch
    if found.estimate is None:
        yield replace(SMALLER_BATCHES, detail="not even one sample fits", checked=True, fits=False)
        return
    yield replace(
        of(found.size),
        detail=f"fits, with a peak of {trials.beside(found.estimate.peak_allocated)}; {found.end}",
        checked=True,
        fits=True,
        saved=trials.saving(found.estimate.peak_allocated),
    )


def accumulation(trials: Trials) -> Iterator[Action]:
    """The largest batch that fits and divides the effective one."""
    size, effective = trials.size, trials.size * trials.situation.accumulate
    most = trials.largest_batch.size if trials.can_tell_what_fits else size // 2
    for smaller in (n for n in range(min(most, size - 1), 0, -1) if effective % n == 0):
        estimate = trials.at(smaller, effective // smaller)
        fits = trials.fits_if_it_tells(estimate)
        if fits is False:
            continue
        action = replace(
            ACCUMULATE,
            title=f"Accumulate gradients over {effective // smaller} batches of {smaller}",
            code=f"{_loader(smaller)}, Trainer(accumulate_grad_batches={effective // smaller})",
        )
        if fits is None:
            yield compared(trials, estimate, action)
        else:
            peak = trials.beside(estimate.peak_allocated)
            yield replace(
                action,
                detail=f"keeps the effective batch of {effective} and fits, with a peak of {peak}",
                checked=True,
                fits=True,
                saved=trials.saving(estimate.peak_allocated),
            )
        return


def checkpointing(trials: Trials) -> Iterator[Action]:
    """What GradientCheckpointing() takes by itself; where it is at work already, a plan that fits."""
    if trials.situation.plan is not None:
        better = list(least_recomputation(trials))
        yield from better
        if not better:
            title = "Recompute more activations than already"
            detail = "no plan was found that fits"
            yield replace(RECOMPUTE, title=title, code="", detail=detail, checked=True, fits=False)
        return
    plan = trials.auto_plan()
    if plan.refused is not None:
        yield replace(RECOMPUTE, code="", detail=plan.refused.rstrip("."), checked=True, fits=False)
        return
    assert plan.peak_bytes is not None
    if trials.can_tell_what_fits and plan.peak_bytes > trials.usable:
        # The plan's own trace says that it is not enough; another one would only add what the allocator reserves.
        yield said_of(trials, plan.peak_bytes, _recompute(plan, RECOMPUTE.code), fits=False, price=_price(plan))
        return
    yield compared(trials, trials.situation.estimate(plan=plan), _recompute(plan, RECOMPUTE.code), price=_price(plan))


def least_recomputation(trials: Trials) -> Iterator[Action]:
    """The plan of least recomputation that fits, if there is one."""
    planned = trials.plan_that_fits() if trials.can_tell_what_fits else None
    if planned is None or planned.plan.refused is not None:
        return
    action = _recompute(planned.plan, f'GradientCheckpointing(memory_budget="{planned.budget}")')
    yield compared(trials, planned.estimate, action, price=_price(planned.plan))


def precision(trials: Trials) -> Iterator[Action]:
    """Computing in bfloat16."""
    yield compared(trials, trials.situation.estimate(precision=_BF16), BFLOAT16)


def optimizer(trials: Trials) -> Iterator[Action]:
    """One number of state per weight."""
    optimizers = trials.situation.optimizers
    if len(optimizers) != 1 or isinstance(optimizers[0], torch.optim.SGD):
        return
    # Adafactor's state is smaller still, but its step reads values, which a trace does not have.
    estimate = trials.situation.estimate(optimizer=lambda own: torch.optim.SGD(own, lr=1e-3, momentum=0.9))
    title = f"{SMALLER_STATE.title} than {type(optimizers[0]).__name__}'s"
    yield compared(
        trials, estimate, replace(SMALLER_STATE, title=title, code="torch.optim.SGD(parameters, momentum=0.9, ...)")
    )


def larger_gpu(trials: Trials) -> Iterator[Action]:
    """The smallest known GPU on which the step fits."""
    if not trials.can_tell_what_fits:
        raise NotFoundError("as far as a trace shows, the step fits on this one")
    plain = trials.plain
    for gpu in sorted(known_gpus(), key=lambda gpu: gpu.usable_bytes):
        usable = DeviceLimit.parse(gpu.name).usable - trials.situation.untraced
        if usable > trials.usable and plain.peak_allocated <= usable and plain.fits(f"{usable}B"):
            yield replace(
                LARGER_GPU,
                title=f"{LARGER_GPU.title} ({gpu.name})",
                detail="the smallest of those known on which this step fits as it is",
                checked=True,
                fits=True,
            )
            return


def growth(trials: Trials) -> Iterator[Action]:
    """Letting go of what has come together over the batches."""
    grown = trials.situation.facts.grown
    assert grown is not None
    enough = trials.plain_fits_with(grown.n_bytes)
    without = {True: "the step fits", False: "the step would not fit either", None: "it is not known what would fit"}
    yield replace(
        FIND_GROWTH,
        title=f"Find what grows by {format_size(grown.n_bytes // grown.n_batches)} a batch",
        detail=f"{format_size(grown.n_bytes)} have come together in {grown.n_batches} batches that belong to neither "
        "model, optimizers nor inputs, such as losses or outputs that are kept with their graph (use `.detach()`); "
        f"without them {without[enough]}",
        checked=True,
        fits=enough,
        saved=grown.n_bytes,
    )


def compared(trials: Trials, estimate: MemoryEstimate, action: Action, *, price: str = "") -> Action:
    """By how much a changed step's peak is lower, and whether that is enough."""
    fits = trials.fits_if_it_tells(estimate) if trials.saving(estimate.peak_allocated) else False
    return said_of(trials, estimate.peak_allocated, action, fits=fits, price=price)


def said_of(trials: Trials, peak: int, action: Action, *, fits: bool | None, price: str = "") -> Action:
    """An action with what is known of the step's peak with it."""
    saved = trials.saving(peak)
    if not saved:
        return replace(action, detail="no lower peak", checked=True, fits=False)
    minus = f"minus {format_size(saved)}" + (f" at {price}" if price else "")
    detail = f"{minus}{' ' if fits is None else ', '}{trials.whether(peak, fits=fits)}"
    return replace(action, detail=detail, checked=True, fits=fits, saved=saved)


def _recompute(plan: CheckpointPlan, code: str) -> Action:
    names = ", ".join(f"`{chain.name or '(the model)'}`" for chain in plan.chains if chain.ranges)
    return replace(RECOMPUTE, title=f"Recompute activations of {names}", code=code)


def _price(plan: CheckpointPlan) -> str:
    extra = plan.extra_operations
    return f"{extra:.0%} more computation" if extra >= _LEAST_PRICE else "less than 1% more computation"


def _loader(size: int) -> str:
    return f"DataLoader(batch_size={size})"
