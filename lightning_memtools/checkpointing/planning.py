"""`plan_checkpoints`: from a module and a sample to a plan whose peak was predicted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from lightning_memtools.checkpointing.apply import Applied
from lightning_memtools.checkpointing.find import Chain, NothingToApplyTo, depths, find_chains, say_nothing_found
from lightning_memtools.checkpointing.options import BnDropout, Options
from lightning_memtools.checkpointing.places import chain_plans, with_figures, with_forced
from lightning_memtools.checkpointing.plan import Planner
from lightning_memtools.checkpointing.predict import predict
from lightning_memtools.checkpointing.profiling import profile
from lightning_memtools.checkpointing.ranges import ChainPlan, Ranges
from lightning_memtools.checkpointing.segments import cut
from lightning_memtools.checkpointing.table import plan_table
from lightning_memtools.checkpointing.tracing import Cost, Step, device_of
from lightning_memtools.checkpointing.units import estimate
from lightning_memtools.memory.sizes import format_size

# The price that "auto" never goes beyond: a third more operations is about one more forward pass, what gradient
# checkpointing costs in the literature (Chen et al. 2016) and in torch's own use of it.
MOST_OPERATIONS = 1.33
# A plan of "auto" that saves less of the peak is left: each recomputed range costs some 0.5 ms of host time.
LEAST_SAVING = 0.01


class BudgetTooSmallError(ValueError):
    """No plan fits the memory budget; `reachable_bytes` is the smallest peak that one has."""

    def __init__(self, message: str, reachable_bytes: int) -> None:
        super().__init__(message, reachable_bytes)
        self.reachable_bytes = reachable_bytes

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What to recompute of a model, and what that was predicted to need. All peaks are of one training step, simulated.

    Attributes:
        chains: What is recomputed of each chain.
        plain: What the step needs without the plan.
        planned: What it needs with it.
        refused: Why nothing is recomputed; None where something is.
    """

    chains: tuple[ChainPlan, ...]
    plain: Cost | None
    planned: Cost | None
    refused: str | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak of allocated memory with the plan, in bytes."""
        return None if self.planned is None else self.planned.peak_bytes

    @property
    def plain_peak_bytes(self) -> int | None:
        """The predicted peak without it."""
        return None if self.plain is None else self.plain.peak_bytes

    @property
    def extra_operations(self) -> float:
        """How many more operations a step takes, as a share of the plain step's: 0.25 is a quarter more."""
        if self.plain is None or self.planned is None or self.plain.operations == 0:
            return 0.0
        return self.planned.operations / self.plain.operations - 1

    def apply(self, module: nn.Module) -> Applied:
        """Put the plan to work in the module that it was made for, or one built the same.

        Returns a handle: `remove()` takes the plan back, and so does leaving it as a context manager.
        """
        return Applied(module, self.chains)

    def table(self, measured_bytes: int | None = None) -> str:
        """The plan as a table in markdown."""
        return plan_table(self.chains, self.plain, self.planned, self.refused, measured_bytes)

    def __str__(self) -> str:
        return self.table()


def plan_checkpoints(
    module: nn.Module,
    *sample_args: Any,
    segments: int | Literal["auto"] = "auto",
    memory_budget: float | str | None = None,
    bn_dropout: BnDropout = "skip",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> CheckpointPlan:
    """Choose which layers of a module's Sequentials to recompute in backward, so that training needs less memory.

    The step is traced on fake tensors: nothing is computed, and neither the module nor random numbers are touched. A
    plan whose predicted peak is not below the plain one is refused; `refused` then says why.

    Args:
        module: The model, in the mode that it is trained in.
        sample_args: What its forward is called with, of the shapes that training has. Gradients are taken of the sum
            of what it returns.
        segments: Cut each Sequential into so many chunks, all but the last recomputed, at the boundaries with the
            lowest peak. "auto" chooses freely: the plan with the lowest product of activation memory and operations,
            with at most a third more operations than the plain step.
        memory_budget: With a float, the share of the plain step's activation memory that the plan may have (1.0
            recomputes nothing); with a size such as "8GiB", the highest allocated peak. The plan is the one with the
            least recomputation that fits.
        bn_dropout: What may happen to BatchNorm and Dropout layers of a Sequential: "skip", they never run twice;
            "recompute", they may, and leave the same traces as if they had not; "avoid", nothing that contains one
            runs twice.
        include: Patterns of module names to take, in place of every Sequential. A match that is no Sequential
            becomes one recomputed segment.
        exclude: Patterns of modules that are never recomputed.

    Raises:
        ValueError: An option is not among those accepted, a pattern matches nothing, or no plan fits the budget.
    """
    options = Options.parse(segments, memory_budget, bn_dropout, include, exclude)
    device = device_of(cuda=any(one.is_cuda for one in module.parameters()))
    step = Step(module, sample_args, lambda model, args: model(*args), device=device)
    return make_plan(step, options)


def make_plan(step: Step, options: Options) -> CheckpointPlan:
    """Plan a step. See `plan_checkpoints`; this one takes any step, with its optimizers."""
    chains = find_chains(step.model, options)
    if not chains:
        said = say_nothing_found(step.model, options)
        warnings.warn(said, NothingToApplyTo, stacklevel=3)
        return CheckpointPlan((), None, None, said)
    plan = _best_of_depths(step, options, chains)
    if plan.refused is not None and options.budget_bytes is None and options.budget_share is None:
        return replace(plan, refused=f"{plan.refused} {_alternatives(step, options)}")
    return plan


def _best_of_depths(step: Step, options: Options, chains: Sequence[Chain]) -> CheckpointPlan:
    """Outer chains first; what lies within their layers only where these gain little."""
    best: CheckpointPlan | None = None
    too_small: BudgetTooSmallError | None = None
    for group in depths(chains):
        try:
            plan = _plan_group(step, options, group)
        except BudgetTooSmallError as error:
            if too_small is None or error.reachable_bytes < too_small.reachable_bytes:
                too_small = error
            continue
        if best is None or _is_better(plan, best):
            best = plan
        if plan.refused is None and (options.segments is not None or _saves_a_third(plan)):
            break
    if best is None:
        assert too_small is not None
        raise too_small
    return best


def _plan_group(step: Step, options: Options, chains: Sequence[Chain]) -> CheckpointPlan:
    measured = profile(step, chains)
    units = with_forced(measured, chains)
    constant = sum(
        old.operations - old.tail_operations for old, new in zip(measured.units, units, strict=True) if old is not new
    )

    def traced(ranges: Ranges) -> CheckpointPlan:
        plans = chain_plans(measured, chains, ranges)
        planned = predict(step, plans) if any(plan.ranges for plan in plans) else measured.plain
        return CheckpointPlan(tuple(with_figures(plans, measured, units)), measured.plain, planned)

    if options.segments is not None:
        return _or_refused(traced(cut(units, options.segments)), least_saving=0.0)
    # A little above the plain peak, because sizes are rounded.
    planner = Planner(units, int(1.02 * max(estimate(units, ()).peak_bytes, measured.plain.peak_bytes)))
    if options.budget_bytes is None and options.budget_share is None:
        return _or_refused(
            traced(_most_worth(planner, measured.plain, constant, _resident(step, measured.plain))), LEAST_SAVING
        )
    plain = measured.plain
    limit = options.budget_bytes
    if limit is None:
        assert options.budget_share is not None
        limit = plain.static_bytes + int(options.budget_share * plain.activation_bytes)
    if plain.peak_bytes <= limit:
        nothing = with_figures(chain_plans(measured, chains, (), forced=False), measured, units)
        reason = f"The plain step's peak of {format_size(plain.peak_bytes)} is within the budget."
        return CheckpointPlan(tuple(nothing), plain, plain, reason)
    return _fitting(planner, traced, limit, options)


def _most_worth(planner: Planner, plain: Cost, constant: int, resident: int) -> Ranges:
    """The plan with the lowest product of memory and operations."""
    most = MOST_OPERATIONS * plain.operations
    points = [(peak, plain.operations + constant + extra) for peak, extra in planner.frontier()]
    affordable = [point for point in points if point[1] <= most] or points[:1]
    peak = min(affordable, key=lambda point: (max(point[0] - resident, 1) * point[1], point[0]))[0]
    return planner.best(peak) or ()


def _resident(step: Step, plain: Cost) -> int:
    """What is allocated all the time: the gradients are not, they are new in every step."""
    gradients = sum(one.numel() * one.element_size() for one in step.model.parameters() if one.requires_grad)
    return plain.static_bytes - gradients


def _fitting(
    planner: Planner, traced: Callable[[Ranges], CheckpointPlan], limit: int, options: Options
) -> CheckpointPlan:
    """The least recomputation whose traced peak is within the limit."""
    aim = float(limit)
    for _ in range(6):
        ranges = planner.best(aim)
        if ranges is None:
            break
        plan = traced(ranges)
        assert plan.planned is not None
        over = plan.planned.peak_bytes - limit
        if over <= 0:
            return plan
        aim -= max(over, 0.002 * limit)
    frontier = planner.frontier()
    smallest = traced(planner.best(frontier[-1][0]) or ()) if frontier else None
    if smallest is not None and smallest.planned is not None and smallest.planned.peak_bytes <= limit:
        return smallest
    reachable = None if smallest is None or smallest.planned is None else smallest.planned
    asked = options.budget_share if options.budget_bytes is None else format_size(limit)
    raise BudgetTooSmallError(
        f"No plan fits memory_budget={asked} (a peak of {format_size(limit)}). "
        + (
            ""
            if reachable is None
            else f"The smallest reachable peak is {format_size(reachable.peak_bytes)}, "
            f"{reachable.activation_bytes / max(_plain_activation(smallest), 1):.3g} of the plain step's activations. "
        )
        + f"Raise the budget, make the batch smaller, or allow more: "
        f"bn_dropout={options.bn_dropout!r}, exclude={list(options.exclude)}.",
        0 if reachable is None else reachable.peak_bytes,
    )


def _plain_activation(plan: CheckpointPlan | None) -> int:
    return 0 if plan is None or plan.plain is None else plan.plain.activation_bytes


def _or_refused(plan: CheckpointPlan, least_saving: float) -> CheckpointPlan:
    """The plan, or without its ranges where it does not lower the peak."""
    assert plan.plain is not None
    assert plan.planned is not None
    was, now = plan.plain.peak_bytes, plan.planned.peak_bytes
    if any(chain.ranges for chain in plan.chains) and now < was * (1 - least_saving):
        return plan
    bare = tuple(chain.without_ranges() for chain in plan.chains)
    if not any(chain.ranges for chain in plan.chains):
        reason = f"No plan lowers the predicted peak of {format_size(was)} at a price worth paying."
    elif now >= was:
        reason = f"The plan does not lower the peak: {format_size(was)} without it, {format_size(now)} with it."
    else:
        reason = f"The plan saves too little to be worth it: {format_size(was)} without it, {format_size(now)} with it."
    return CheckpointPlan(bare, plan.plain, plan.plain, reason)


def _alternatives(step: Step, options: Options) -> str:
    """What another `bn_dropout` would give."""
    found = []
    for other in get_args(BnDropout):
        if other == options.bn_dropout:
            continue
        changed = replace(options, bn_dropout=other)
        plan = _best_of_depths(step, changed, find_chains(step.model, changed))
        what = (
            "no lower peak either"
            if plan.refused
            else f"a peak of {format_size(plan.peak_bytes or 0)}, {plan.extra_operations:.0%} more operations"
        )
        found.append(f'bn_dropout="{other}" would give {what}')
    return f"{'; '.join(found)}."


def _is_better(plan: CheckpointPlan, other: CheckpointPlan) -> bool:
    if plan.refused is not None or other.refused is not None:
        return plan.refused is None
    return (plan.peak_bytes or 0) < (other.peak_bytes or 0)


def _saves_a_third(plan: CheckpointPlan) -> bool:
    assert plan.plain is not None
    assert plan.planned is not None
    return plan.planned.activation_bytes < 2 / 3 * plan.plain.activation_bytes
