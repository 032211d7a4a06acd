"""`plan_checkpoints`: from a module and a sample to a plan whose peak was predicted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_memtools._torch import is_fsdp_module
from lightning_memtools.checkpointing.apply_plan import ChainPlan
from lightning_memtools.checkpointing.chains import (
    Chain,
    NothingToApplyTo,
    find_chains,
    find_modules,
    nothing_found_message,
)
from lightning_memtools.checkpointing.checkpoint_options import (
    BnDropout,
    CheckpointOptions,
    CheckpointOptionsError,
    LossHead,
)
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.key_value_caches import modules_with_caches
from lightning_memtools.checkpointing.least_recomputation import LeastRecomputation
from lightning_memtools.checkpointing.loss_in_chunks import LossInChunks, loss_in_chunks
from lightning_memtools.checkpointing.planned_traces import PlannedTraces
from lightning_memtools.checkpointing.step_parts import StepParts
from lightning_memtools.checkpointing.step_units import StepUnits, units_of_step
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.step_trace import StepCost, StepDiffersError, TracedStep, device_of

# The most operations that "auto" accepts, as a multiple of the plain step's: a third more is about one more forward
# pass, which is what gradient checkpointing costs in the literature (Chen et al. 2016) and in torch's own use of it.
MOST_OPERATIONS = 1.33
# "auto" refuses a plan that saves a smaller share of the peak: each recomputed range costs some 0.5 ms of host time.
_LEAST_SAVING = 0.01
_MOST_TRACED = 2  # of "auto"
_MOST_ATTEMPTS = 6  # to fit a budget
_ALIKE = 0.01  # peaks of which one is enough
_WORTH_A_NOTE = 0.1  # of the peak
_AS_AT_FIRST = (
    "so each trace of it found the model's attributes as the first step does, and the peaks leave out what a step "
    "keeps for later ones"
)
_SHARDED = (
    "the peaks are those of one device that holds the whole model: a rank of FSDP 2 holds a part of the parameters, "
    "gradients and optimizer state, and the same activations"
)


class BudgetTooSmallError(CheckpointOptionsError):
    """No plan fits the memory budget. `reachable_bytes` is the smallest peak that any plan has."""

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
    offload: bool = False,
) -> CheckpointPlan:
    """Choose which parts of a module to recompute in backward, so that training needs less memory.

    The step is traced on fake tensors: nothing is computed, and neither the module nor random numbers are changed. A
    plan whose predicted peak is not below the plain one is refused; `refused` then says why.

    Args:
        module: The model, in the mode that it is trained in.
        sample_args: The arguments of its forward, with the shapes of training. Gradients are taken of the sum of
            everything that it returns.
        segments: Cut each Sequential into this many equal chunks, all but the last recomputed, as
            `torch.utils.checkpoint.checkpoint_sequential` does. "auto" chooses freely: the plan with the lowest product
            of activation memory and operations, with at most a third more operations than the plain step.
        memory_budget: A float is the share of the plain step's activation memory that the plan may have (1.0
            recomputes nothing); a size such as "8GiB" is the highest allocated peak. The plan is the one with the
            least recomputation that fits.
        bn_dropout: What may happen to BatchNorm and Dropout layers of a Sequential: with "skip" they never run twice;
            with "recompute" they may, and the results are the same bit for bit; with "avoid" nothing that contains
            one runs twice; "auto" is "skip", or "recompute" where "skip" leaves nothing worth doing.
        include: Patterns of module names to take instead of choosing among all modules. A match that is no Sequential
            becomes one recomputed segment.
        exclude: Patterns of modules that are never recomputed.
        loss_head: With "auto", a linear layer and the cross-entropy of its output are computed in chunks of rows where
            that lowers the peak and nothing else takes the output; with "keep", all at once.
        offload: Keep the inputs of what is recomputed in pinned host memory between forward and backward.

    Raises:
        ValueError: An option is not among those accepted, a pattern matches nothing, or no plan fits the budget.
    """
    options = CheckpointOptions.parse(segments, memory_budget, bn_dropout, include, exclude, loss_head, offload=offload)
    device = device_of(cuda=any(one.is_cuda for one in module.parameters()))
    step = TracedStep(module, sample_args, lambda model, args: model(*args), device=device)
    return StepPlanner(step).plan(options)


@dataclass(slots=True)
class PlanningProgress:
    """The words for what a planner is busy with. It knows no planner: a cycle would keep the step's batch alive."""

    doing: str = "looking for chains of layers"


class StepPlanner:
    """Plans one training step under any number of options; the plain step is measured only once for most of them.

    The step must not change between plans.

    Args:
        step: The step.

    Attributes:
        progress: What the planner is busy with; a model of a thousand layers takes it several seconds.
        step: The step as it is traced: `first_calls_only` if it fails or gives no loss when it runs again.
    """

    def __init__(self, step: TracedStep) -> None:
        self.progress = PlanningProgress()
        self.step = step
        self._notes: tuple[str, ...] = ()
        self._measured: dict[tuple[Any, ...], StepUnits] = {}
        self._costs: dict[tuple[Any, ...], StepCost] = {}
        self._traces = PlannedTraces()
        self._in_chunks: LossInChunks | None = None
        self._looked_for_head = False

    def plan(self, options: CheckpointOptions, *, nearest: bool = False) -> CheckpointPlan:
        """Return the plan for these options; see `plan_checkpoints`.

        Args:
            options: The options.
            nearest: Take the plan with the lowest peak where none reaches the share of a budget.

        Raises:
            ValueError: A pattern matches nothing, or no plan fits the budget (`BudgetTooSmallError`).
            Exception: Whatever the step raises on fake tensors.
        """
        is_sharded = any(map(is_fsdp_module, self.step.model.modules()))
        if is_sharded and options.budget_bytes is not None:
            raise CheckpointOptionsError(
                f"memory_budget is a peak of {format_size(options.budget_bytes)}, and under FSDP 2 a plan does not "
                "know what else a rank holds: give a share of the activations, such as memory_budget=0.5."
            )
        loss = self.step_in_chunks() if options.loss_head == "auto" else None
        with self._traces:
            plan = self._with_loss(loss, options, nearest=nearest)
        notes = list(plan.notes)
        cached = modules_with_caches(self.step.model) if plan.chains else {}
        if cached:
            names = ", ".join(sorted({type(one).__name__ for one in cached.values()}))
            notes.append(f"use_cache of {names} is off in training, where blocks run twice")
        notes += [_SHARDED] if is_sharded and plan.chains else []
        if loss is not None and loss.read_by and loss.logits[2] > _WORTH_A_NOTE * (plan.peak_bytes or 0):
            notes.append(f"{loss.size}, and {loss.read_by} reads them, so that their loss is not computed in chunks")
        return replace(plan, notes=(*notes, *self._notes))

    def step_in_chunks(self) -> LossInChunks | None:
        """Trace the step with its loss in chunks, once; return None if it has no cross-entropy of a linear layer."""
        if not self._looked_for_head:
            self._looked_for_head = True
            self.progress.doing = "tracing a step with its loss in chunks"
            # The user's step may do anything with logits that are not there; what is wrong with it is found later.
            with suppress(Exception):
                self._in_chunks = loss_in_chunks(self.step)
        return self._in_chunks

    def _with_loss(self, loss: LossInChunks | None, options: CheckpointOptions, *, nearest: bool) -> CheckpointPlan:
        """Return the plan, with a loss in chunks if that saves memory and a budget needs any change at all."""
        if loss is None or not loss.saves(_LEAST_SAVING) or _fits(loss.plain, options):
            return self._without_dropout_first(_Task(options), nearest=nearest)
        options = replace(options, exclude=(*options.exclude, *loss.names))
        plan = self._without_dropout_first(_Task(options, loss.names, loss.plain, loss.cost), nearest=nearest)
        note = f"the loss of {' and '.join(loss.names)} is computed in chunks of {loss.chunk_rows} rows: {loss.size}"
        return replace(plan, refused=None, notes=(note, *plan.notes), heads=loss.names)

    def _without_dropout_first(self, task: _Task, *, nearest: bool) -> CheckpointPlan:
        """Return a plan; for "auto" one that runs no BatchNorm or Dropout layer twice, if there is one."""
        if task.options.bn_dropout != "auto":
            return self._best(task, nearest=nearest)
        plan = None
        with suppress(BudgetTooSmallError):
            plan = self._best(task.running_twice("skip"))
        if plan is not None and plan.refused is None:
            return plan
        other = self._best(task.running_twice("recompute"), nearest=nearest)
        if plan is not None and other.refused is not None:
            return plan
        note = "BatchNorm and Dropout layers are recomputed too: without them no plan is worth its cost or fits"
        return replace(other, notes=(*other.notes, note))

    def _best(self, task: _Task, *, nearest: bool = False) -> CheckpointPlan:
        """Return the best plan of those that were traced."""
        options = task.options
        chains = find_chains(self.step.model, options)
        if options.include is None and options.segments is None:
            chains += find_modules(self.step.model, chains, options)
        units = self._units(task, chains) if chains else None
        parts = None if units is None else StepParts.of(units, chains)
        if units is None or parts is None or not parts.spans:
            message = nothing_found_message(self.step.model, options)
            if not task.heads:
                warnings.warn(message, NothingToApplyTo, stacklevel=5)
            return CheckpointPlan((), task.plain, task.in_chunks, message)
        work = _Work(options, task.heads, task.plain or units.plain, task.in_chunks or units.plain, parts)
        if options.segments is not None:
            return self._or_refused(work, parts.chunks(options.segments), 0.0)
        if _fits(work.plain, options):
            reason = f"The plain step's peak of {format_size(work.plain.peak_bytes)} is within the budget."
            return CheckpointPlan((), work.plain, work.plain, reason, left_out=parts.left_out)
        self.progress.doing = f"choosing what to recompute among {len(units.units)} layers"
        # A little above the plain peak, because sizes are rounded.
        limit = int(1.02 * max(units.plain.peak_bytes, work.plain.peak_bytes))
        least = LeastRecomputation(units.units, [*parts.spans], limit, parts.forced, offload=options.offload)
        if options.has_budget:
            return self._fitting(work, least, nearest=nearest)
        plan = self._or_refused(work, self._lowest_product(work, least), _LEAST_SAVING)
        if plan.refused is None or task.heads or options.bn_dropout not in {"skip", "avoid"}:
            return plan
        return replace(plan, refused=f"{plan.refused} {self._with_dropout(task)}")

    def _units(self, task: _Task, chains: Sequence[Chain]) -> StepUnits:
        """Measure the units of the step, once for all plans of these chains."""
        key = task.heads, *((chain.name, chain.layers) for chain in chains)
        if key not in self._measured:
            n_layers = sum(len(chain.layers) for chain in chains)
            self.progress.doing = f"tracing a step layer by layer, {n_layers} of them"
            try:
                self._measured[key] = units_of_step(self.step, chains, task.heads, task.in_chunks)
            except StepDiffersError as error:
                if self.step.first_calls_only:
                    raise
                # A step that counts its calls may expect a number of them, or give a loss at every second one alone.
                self.step = replace(self.step, first_calls_only=True)
                self._notes = (f"{error}, {_AS_AT_FIRST}",)
                return self._units(task, chains)
        return self._measured[key]

    def _plan(self, work: _Work, chains: tuple[ChainPlan, ...]) -> CheckpointPlan:
        """Return the plan that recomputes this, traced."""
        offload = work.options.offload
        key = work.heads, offload, chains
        if not chains:
            self._costs[key] = work.in_chunks
        if key not in self._costs:
            self.progress.doing = "tracing a step under the plan"
            self._costs[key] = self._traces.cost(self.step, chains, work.heads, offload=offload)
        found = CheckpointPlan(chains, work.plain, self._costs[key], left_out=work.parts.left_out, offload=offload)
        if not (offload and chains):
            return found
        return replace(found, notes=("the inputs of what is recomputed are kept in host memory",))

    def _or_refused(self, work: _Work, chains: tuple[ChainPlan, ...], least_saving: float) -> CheckpointPlan:
        """Return the plan, or one without any ranges if it does not lower the peak by this share."""
        plan = self._plan(work, chains)
        was, now = work.in_chunks.peak_bytes, plan.peak_bytes or 0
        if chains and now < was * (1 - least_saving):
            return plan
        reason = f"No plan lowers the predicted peak of {format_size(was)} at an acceptable cost."
        if chains:
            does = "does not lower the peak" if now >= was else "saves too little"
            reason = f"The plan {does}: {format_size(was)} without it, {format_size(now)} with it."
        return CheckpointPlan((), work.plain, work.in_chunks, reason, left_out=work.parts.left_out)

    def _lowest_product(self, work: _Work, least: LeastRecomputation) -> tuple[ChainPlan, ...]:
        """Return the ranges with the lowest product of memory and operations, of the few that were traced."""
        most = MOST_OPERATIONS * work.plain.operations

        def product(peak: int, operations: int) -> int:
            return max(peak - work.plain.resident_bytes, 1) * operations

        points = [(peak, work.plain.operations + extra) for peak, extra in least.frontier()]
        allowed = [one for one in points if one[1] <= most] or points[:1]
        best: tuple[ChainPlan, ...] = ()
        lowest, tried = product(work.in_chunks.peak_bytes, work.plain.operations), list[int]()
        for peak, _ in sorted(allowed, key=lambda one: (product(*one), one[0])):
            if len(tried) == _MOST_TRACED:
                break
            if any(abs(peak - other) < _ALIKE * peak for other in tried):
                continue
            tried.append(peak)
            chains = work.parts.plans(least.best(peak) or ())
            cost = self._plan(work, chains).planned
            assert cost is not None
            found = product(cost.peak_bytes, cost.operations)
            if found < lowest and cost.operations <= most:
                best, lowest = chains, found
        return best

    def _fitting(self, work: _Work, least: LeastRecomputation, *, nearest: bool) -> CheckpointPlan:
        """Return the plan with the least recomputation whose traced peak is within the limit."""
        limit = _limit(work.plain, work.options)
        assert limit is not None
        aim = float(limit)
        tried: list[CheckpointPlan] = []
        for attempt in range(_MOST_ATTEMPTS):
            spans = least.best(aim)
            if spans is None:
                break
            plan = self._plan(work, work.parts.plans(spans))
            over = (plan.peak_bytes or 0) - limit
            if over <= 0:
                return plan
            tried.append(plan)
            aim -= over + 0.001 * 2**attempt * limit
        tried += [self._plan(work, work.parts.plans(least.best(peak) or ())) for peak, _ in least.frontier()[-1:]]
        smallest = min(tried, key=lambda plan: plan.peak_bytes or 0, default=None)
        is_share = work.options.budget_share is not None
        if smallest is not None and ((smallest.peak_bytes or 0) <= limit or (nearest and is_share)):
            return smallest
        raise _too_small(work.options, limit, work.plain, smallest)

    def _with_dropout(self, task: _Task) -> str:
        """Describe what a plan would give that may run BatchNorm and Dropout layers twice."""
        plan = self._best(task.running_twice("recompute"))
        result = (
            "no lower peak either"
            if plan.refused
            else f"a peak of {format_size(plan.peak_bytes or 0)}, {plan.extra_operations:.0%} more operations"
        )
        return f'bn_dropout="recompute" would give {result}.'


@dataclass(frozen=True, slots=True)
class _Task:
    """A plan to make: the options, the layers whose loss is computed in chunks, and the costs without and with that."""

    options: CheckpointOptions
    heads: tuple[str, ...] = ()
    plain: StepCost | None = None
    in_chunks: StepCost | None = None

    def running_twice(self, bn_dropout: BnDropout) -> _Task:
        """Return the same with another choice of what may happen to BatchNorm and Dropout."""
        return replace(self, options=replace(self.options, bn_dropout=bn_dropout))


@dataclass(frozen=True, slots=True)
class _Work:
    """A task whose step was measured: the cost of the plain step, that with its loss in chunks, and the parts."""

    options: CheckpointOptions
    heads: tuple[str, ...]
    plain: StepCost
    in_chunks: StepCost
    parts: StepParts


def _fits(plain: StepCost, options: CheckpointOptions) -> bool:
    limit = _limit(plain, options)
    return limit is not None and plain.peak_bytes <= limit


def _limit(plain: StepCost, options: CheckpointOptions) -> int | None:
    """Return the highest peak that a budget allows."""
    if options.budget_share is not None:
        return plain.static_bytes + int(options.budget_share * plain.activation_bytes)
    return options.budget_bytes


def _too_small(
    options: CheckpointOptions, limit: int, plain: StepCost, smallest: CheckpointPlan | None
) -> BudgetTooSmallError:
    reachable = None if smallest is None else smallest.planned
    budget = options.budget_share if options.budget_bytes is None else format_size(limit)
    message = f"No plan fits memory_budget={budget} (a peak of {format_size(limit)}). "
    if smallest is not None and reachable is not None:
        share = reachable.activation_bytes / max(plain.activation_bytes, 1)
        message += (
            f"The smallest reachable peak is {format_size(reachable.peak_bytes)}, {share:.3g} of the plain step's "
            f"activations, by recomputing {smallest.recomputed(3)} ({smallest.extra_operations:.0%} more operations). "
        )
    ways = ["raise the budget"]
    if options.budget_share is None:  # a share of the activations is no easier to reach with a smaller batch
        ways.append("make the batch smaller")
    if options.bn_dropout == "skip":
        ways.append('let layers of BatchNorm and Dropout be recomputed, if there are any (bn_dropout="auto")')
    message += f"Next: {' or '.join(ways)}."
    return BudgetTooSmallError(message, 0 if reachable is None else reachable.peak_bytes)
