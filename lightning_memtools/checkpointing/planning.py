"""`plan_checkpoints`: makes a plan with a predicted peak from a module and a sample batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from lightning_memtools._torch import is_fsdp_module
from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan
from lightning_memtools.checkpointing.chains import Chain, find_chains, find_modules
from lightning_memtools.checkpointing.checkpoint_options import (
    BnDropout,
    CheckpointOptions,
    CheckpointOptionsError,
    LossHead,
)
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.least_recomputation import LeastRecomputation, StepParts
from lightning_memtools.checkpointing.loss_in_chunks import LossInChunks, loss_in_chunks
from lightning_memtools.checkpointing.step_units import StepUnits, units_of_step
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.tracer import StepCost, StepRequest, StepTrace, tracing

# The most operations that "auto" accepts, as a multiple of the plain step's: a third more is about one more forward
# pass, which is what gradient checkpointing costs in the literature (Chen et al. 2016) and in torch's own use of it.
MOST_OPERATIONS = 1.33
# "auto" refuses a plan that saves a smaller share of the peak: each recomputed range costs some 0.5 ms of host time.
_LEAST_SAVING = 0.01
_MOST_TRACED = 2  # of "auto"
_MOST_ATTEMPTS = 6  # to fit a budget
_ALIKE = 0.01  # peaks of which one is enough
_WORTH_A_NOTE = 0.1  # of the peak
_SHARDED = (
    "the peaks are those of one device that holds the whole model: a rank of FSDP 2 holds a part of the parameters, "
    "gradients and optimizer state, and the same activations"
)

_Chains = tuple[ChainPlan, ...]
_CostOf = Callable[[_Chains], StepCost]


class BudgetTooSmallError(CheckpointOptionsError):
    """Raised if no checkpoint plan fits the memory budget. `reachable_bytes` is the lowest peak that a plan reaches."""

    def __init__(self, message: str, reachable_bytes: int) -> None:
        super().__init__(message, reachable_bytes)
        self.reachable_bytes = reachable_bytes

    def __str__(self) -> str:
        return str(self.args[0])


def plan_checkpoints(
    module: nn.Module,
    *sample_args: Any,
    segments: int | Literal["auto"] = "auto",
    memory_budget: float | str | None = None,
    bn_dropout: BnDropout = "skip",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    loss_head: LossHead = "auto",
) -> CheckpointPlan:
    """Choose which parts of a module to recompute in backward, so that training needs less memory.

    A step is traced on fake tensors: nothing is computed, and neither the module nor any random state changes. If no
    plan lowers the predicted peak, the returned plan recomputes nothing, and its attribute `refused` says why.

    Args:
        module: The model, in the mode that it is trained in.
        sample_args: The arguments of the model's forward, with shapes as in training. The traced step calls backward on
            the sum of everything that forward returns.
        segments: Each Sequential is cut into this many equal chunks, of which all but the last are recomputed, as in
            `torch.utils.checkpoint.checkpoint_sequential`. "auto" takes the plan with the lowest product of activation
            memory and operations, with at most a third more operations than an ordinary step.
        memory_budget: A float is the fraction of an ordinary step's activation memory that may be used. A size such as
            "8GiB" is the highest allowed peak. Of the plans that fit, the one with the least recomputation is taken.
        bn_dropout: With "skip", BatchNorm and Dropout layers of a Sequential are never recomputed. With "recompute"
            they may be, and the results are still the same bit for bit.
        include: Name patterns of the modules that may be recomputed; by default any module may.
        exclude: Name patterns of modules that are never recomputed.
        loss_head: With "auto", a linear layer and the cross-entropy of its output are computed in chunks of rows, if
            that lowers the peak and nothing else reads the output; with "keep", all at once.

    Raises:
        ValueError: An argument is invalid, a pattern matches no module, or no plan fits the budget.
    """
    options = CheckpointOptions.parse(segments, memory_budget, bn_dropout, include, exclude, loss_head)
    is_on_cuda = any(parameter.is_cuda for parameter in module.parameters())
    step = StepRequest(model=module, batch=sample_args, step=lambda model, args: model(*args), cuda=is_on_cuda)
    return StepPlanner(step).plan(options)


class StepPlanner:
    """Makes checkpoint plans for one training step.

    Measurements of the step are reused by later plans, so the step must not change between plans.

    Args:
        step: The training step, as it can be traced on fake tensors.
    """

    def __init__(self, step: StepRequest) -> None:
        self._step = step
        self._measured: dict[tuple[Any, ...], StepUnits] = {}
        self._costs: dict[tuple[str, ...], dict[_Chains, StepCost]] = {}

    def plan(self, options: CheckpointOptions, *, nearest: bool = False) -> CheckpointPlan:
        """Return the best plan for these options, as `plan_checkpoints` does.

        Args:
            options: What to recompute, and the memory budget.
            nearest: If the budget is a fraction and no plan fits, return the plan with the lowest peak; do not raise.

        Raises:
            ValueError: A pattern matches no module, or no plan fits the budget (`BudgetTooSmallError`).
            Exception: Whatever the step raises on fake tensors.
        """
        is_sharded = any(map(is_fsdp_module, self._step.model.modules()))
        if is_sharded and options.budget_bytes is not None:
            raise CheckpointOptionsError(
                f"memory_budget is a peak of {format_size(options.budget_bytes)}, and under FSDP 2 a plan does not "
                "know what else a rank holds: give a share of the activations, such as memory_budget=0.5."
            )
        loss = self.in_chunks if options.loss_head == "auto" else None
        # Where a budget needs no change at all, the loss stays as it is.
        serves = loss is not None and loss.saves(_LEAST_SAVING) and not options.fits(loss.plain)
        plan = self._best(options, loss if serves else None, nearest=nearest)
        notes: list[str] = []
        if loss is not None and serves:
            plan = replace(plan, refused=None, heads=loss.names)
            names = " and ".join(loss.names)
            notes.append(f"the loss of {names} is computed in chunks of {loss.chunk_rows} rows: {loss.size}")
        if loss is not None and loss.read_by and loss.logits[2] > _WORTH_A_NOTE * plan.peak_bytes:
            notes.append(f"{loss.size}, and {loss.read_by} reads them, so that their loss is not computed in chunks")
        notes += [_SHARDED] if is_sharded and plan.chains else []
        return replace(plan, notes=tuple(notes))

    @cached_property
    def in_chunks(self) -> LossInChunks | None:
        """The memory saved by computing the loss in chunks; None if no linear layer feeds a cross-entropy."""
        # The user's step may do anything with logits that are not there; what is wrong with it is found later.
        with suppress(Exception):
            return loss_in_chunks(self._step)
        return None

    def _best(self, options: CheckpointOptions, loss: LossInChunks | None, *, nearest: bool) -> CheckpointPlan:
        """Return the best plan, with the loss in chunks if `loss` is given. For `nearest`, see `plan`."""
        heads = () if loss is None else loss.names
        options = replace(options, exclude=(*options.exclude, *heads))
        chains = find_chains(self._step.model, options)
        if options.segments is None:
            chains += find_modules(self._step.model, chains, options)
        units = self._units(chains, loss)
        plain, start = units.plain if loss is None else loss.plain, units.plain
        with _cost_of_plans(self._step, heads, self._costs.setdefault(heads, {(): start})) as cost_of:
            return _PlanSearch(options, plain, start, StepParts.of(units, chains), cost_of).plan(nearest=nearest)

    def _units(self, chains: Sequence[Chain], loss: LossInChunks | None) -> StepUnits:
        """Cut the step into units at the layers of `chains`, and measure each unit. The result is cached."""
        heads, cost = ((), None) if loss is None else (loss.names, loss.cost)
        key = heads, *((chain.name, chain.layers) for chain in chains)
        if key not in self._measured:
            self._measured[key] = units_of_step(self._step, chains, heads, cost)
        return self._measured[key]


@contextmanager
def _cost_of_plans(step: StepRequest, heads: Sequence[str], known: dict[_Chains, StepCost]) -> Iterator[_CostOf]:
    """Context manager: yield a function that applies plans, traces the step and returns its memory and operations.

    Results are cached in `known`. The loss of the linear layers named in `heads` is computed in chunks.
    """
    traces: list[StepTrace] = []
    with ExitStack() as stack:

        def cost_of(plans: _Chains) -> StepCost:
            if plans not in known:
                if not traces:  # the first run leaves memory, and what codebooks set up once, as a later step finds it
                    traces.append(stack.enter_context(tracing(step)))
                    traces[0].run()
                with AppliedPlan(traces[0].model, plans, heads=heads):
                    known[plans] = traces[0].run()
            return known[plans]

        yield cost_of


def predict(step: StepRequest, plans: Sequence[ChainPlan], heads: Sequence[str] = ()) -> StepCost:
    """Return the memory and operations of a step with `plans` applied, and with the loss of `heads` in chunks."""
    with _cost_of_plans(step, heads, {}) as cost_of:
        return cost_of(tuple(plans))


@dataclass(frozen=True, slots=True)
class _PlanSearch:
    """Searches for the best checkpoint plan, by tracing a step with plans that dynamic programming has proposed.

    Attributes:
        options: What to recompute, and the memory budget.
        plain: The memory and operations of the step as it is.
        start: The memory and operations without recomputation, but with the loss in chunks if that is used.
        parts: The parts of the step that may run twice.
        cost_of: A function that applies plans, traces the step and returns its memory and operations.
    """

    options: CheckpointOptions
    plain: StepCost
    start: StepCost
    parts: StepParts
    cost_of: _CostOf

    def plan(self, *, nearest: bool) -> CheckpointPlan:
        """Return the best plan. If no plan fits, return the plan with the lowest peak (if `nearest`) or raise."""
        if self.options.segments is not None:
            return self._or_refused(self.parts.chunks(self.options.segments), 0.0)
        limit = self.options.limit(self.plain)
        if limit is not None and self.start.peak_bytes <= limit:
            return self._plan((), f"The peak of {format_size(self.start.peak_bytes)} is within the budget.")
        # A little above the plain peak, because sizes are rounded.
        least = LeastRecomputation(self.parts, int(1.02 * max(self.start.peak_bytes, self.plain.peak_bytes)))
        if limit is not None:
            return self._fitting(limit, least, nearest=nearest)
        return self._or_refused(self._lowest_product(least), _LEAST_SAVING)

    def _plan(self, chains: _Chains, refused: str | None = None) -> CheckpointPlan:
        """Return a plan to recompute `chains`, with its traced cost. `refused` is the reason if `chains` is empty."""
        return CheckpointPlan(chains, self.plain, self.cost_of(chains), refused, left_out=self.parts.left_out)

    def _or_refused(self, chains: _Chains, least_saving: float) -> CheckpointPlan:
        """Return a plan to recompute `chains`, or nothing if that saves less than the fraction `least_saving`."""
        plan = self._plan(chains)
        if chains and plan.peak_bytes < self.start.peak_bytes * (1 - least_saving):
            return plan
        reason = f"No plan lowers the predicted peak of {format_size(self.start.peak_bytes)} at an acceptable cost."
        if any("never runs twice" in why for why in self.parts.left_out.values()):
            reason += ' With bn_dropout="recompute", BatchNorm and Dropout layers may run twice too.'
        return self._plan((), reason)

    def _lowest_product(self, least: LeastRecomputation) -> _Chains:
        """Trace the best plans of `least`, and return the plan whose activation memory times operations is lowest."""
        most = MOST_OPERATIONS * self.plain.operations

        def product(peak: int, operations: int) -> int:
            return max(peak - self.plain.resident_bytes, 1) * operations

        points = [(peak, self.plain.operations + extra) for peak, extra in least.frontier()]
        allowed = [point for point in points if point[1] <= most] or points[:1]
        best: _Chains = ()
        lowest, tried = product(self.start.peak_bytes, self.plain.operations), list[int]()
        for peak, _ in sorted(allowed, key=lambda point: (product(*point), point[0])):
            if len(tried) == _MOST_TRACED:
                break
            if any(abs(peak - other) < _ALIKE * peak for other in tried):
                continue
            tried.append(peak)
            chains = least.best(peak) or ()
            cost = self.cost_of(chains)
            value = product(cost.peak_bytes, cost.operations)
            if value < lowest and cost.operations <= most:
                best, lowest = chains, value
        return best

    def _fitting(self, limit: int, least: LeastRecomputation, *, nearest: bool) -> CheckpointPlan:
        """Return the cheapest plan within `limit`. If none fits, raise, or if `nearest`, return the smallest plan."""
        aim = float(limit)
        tried: list[CheckpointPlan] = []
        for attempt in range(_MOST_ATTEMPTS):
            chains = least.best(aim)
            if chains is None:
                break
            plan = self._plan(chains)
            over = plan.peak_bytes - limit
            if over <= 0:
                return plan
            tried.append(plan)
            aim -= over + 0.001 * 2**attempt * limit
        lowest = least.frontier()[-1:]
        tried.append(self._plan((least.best(lowest[0][0]) or ()) if lowest else ()))
        smallest = min(tried, key=lambda plan: plan.peak_bytes)
        if smallest.peak_bytes <= limit or (nearest and self.options.budget_share is not None):
            return smallest
        raise _too_small(self.options, limit, smallest)


def _too_small(options: CheckpointOptions, limit: int, smallest: CheckpointPlan) -> BudgetTooSmallError:
    budget = options.budget_share if options.budget_bytes is None else format_size(limit)
    share = smallest.planned.activation_bytes / max(smallest.plain.activation_bytes, 1)
    norms = ', or let BatchNorm and Dropout run twice (bn_dropout="recompute")' if options.bn_dropout == "skip" else ""
    return BudgetTooSmallError(
        f"No plan fits memory_budget={budget} (a peak of {format_size(limit)}). The smallest reachable peak is "
        f"{format_size(smallest.peak_bytes)}, {share:.3g} of the plain step's activations, by recomputing "
        f"{smallest.recomputed(3)} ({smallest.extra_operations:.0%} more operations). "
        f"Next: raise the budget{' or make the batch smaller' * (options.budget_share is None)}{norms}.",
        smallest.peak_bytes,
    )
