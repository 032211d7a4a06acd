"""`plan_checkpoints`: from a module and a sample to a plan whose peak was predicted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from torch import nn

from lightning_memtools.checkpointing.chains import (
    Chain,
    NothingToApplyTo,
    ancestors,
    depths,
    find_chains,
    find_modules,
    nothing_found_message,
)
from lightning_memtools.checkpointing.checkpoint_options import (
    BnDropout,
    CheckpointOptions,
    CheckpointOptionsError,
    LossHead,
    Offload,
)
from lightning_memtools.checkpointing.checkpoint_plan import (
    CheckpointPlan,
    chain_plans,
    rows_of,
    units_under,
    with_figures,
)
from lightning_memtools.checkpointing.fixed_segments import cut
from lightning_memtools.checkpointing.key_value_caches import modules_with_caches
from lightning_memtools.checkpointing.loss_in_chunks import LossInChunks, loss_in_chunks
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range, Ranges, Unit, estimate
from lightning_memtools.checkpointing.offload_choice import (
    DeviceRates,
    OffloadedLayer,
    choices,
    free_host_bytes,
    offloadable,
    rows_without,
    units_with_offload,
    waiting_seconds,
)
from lightning_memtools.checkpointing.optimal_ranges import INFINITE, OptimalRanges, Row
from lightning_memtools.checkpointing.step_profile import StepProfile, predict, profile_step
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.step_runner import AUTOCAST_TYPES
from lightning_memtools.simulation.step_trace import StepCost, StepDiffersError, TracedStep, device_of

# The most operations that "auto" accepts, as a multiple of the plain step's: a third more is about one more forward
# pass, which is what gradient checkpointing costs in the literature (Chen et al. 2016) and in torch's own use of it.
MOST_OPERATIONS = 1.33
# "auto" refuses a plan that saves a smaller share of the peak: each recomputed range costs some 0.5 ms of host time.
LEAST_SAVING = 0.01
_MOST_ATTEMPTS = 6
_MOST_COMPARED = 2  # of "auto"
_ALIKE = 0.01  # peaks of which one is enough
_FEW_UNITS = 100
_WORTH_A_NOTE = 0.1  # of the peak
_FAR_OFF = 0.1  # for an estimate of the plain peak
_AS_AT_FIRST = (
    "so each trace of it found the model's attributes as the first step does, and the peaks leave out what a step "
    "keeps for later ones"
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
    offload: Offload = False,
    host_memory: str | None = None,
) -> CheckpointPlan:
    """Choose which parts of a module to recompute in backward, so that training needs less memory.

    The step is traced on fake tensors: nothing is computed, and neither the module nor random numbers are changed. A
    plan whose predicted peak is not below the plain one is refused; `refused` then says why.

    Args:
        module: The model, in the mode that it is trained in.
        sample_args: The arguments of its forward, with the shapes of training. Gradients are taken of the sum of
            everything that it returns.
        segments: Cut each Sequential into this many chunks, all but the last recomputed, at the boundaries with the
            lowest peak. "auto" chooses freely: the plan with the lowest product of activation memory and operations,
            with at most a third more operations than the plain step.
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
        offload: With True, what layers keep for backward goes to pinned host memory in forward and comes back in
            backward, as far as there is room; with "auto", where that is estimated to take less time than running
            layers again. No GPU has confirmed the estimate of time yet; the memory is traced.
        host_memory: The host memory for it in each process, such as "64GiB"; by default a quarter of what is free,
            divided by the processes of the machine.

    Raises:
        ValueError: An option is not among those accepted, a pattern matches nothing, or no plan fits the budget.
    """
    options = CheckpointOptions.parse(
        segments, memory_budget, bn_dropout, include, exclude, loss_head, offload, host_memory
    )
    device = device_of(cuda=any(one.is_cuda for one in module.parameters()))
    step = TracedStep(module, sample_args, lambda model, args: model(*args), device=device)
    planner = StepPlanner(step, measures_rates=True)
    return planner.with_advice(planner.plan(options))


@dataclass(slots=True)
class PlanningProgress:
    """The words for what a planner is busy with. It knows no planner: a cycle would keep the step's batch alive."""

    doing: str = "looking for chains of layers"


class StepPlanner:
    """Plans one training step under any number of options, and profiles it only once for all of them.

    Plans share a profile, and its trace of the plain step, unless `include` or `exclude` differ: a profile watches
    certain modules. Where chains lie within layers of other chains, each depth of nesting is profiled once. The step
    must not change between plans.

    Args:
        step: The step.
        measures_rates: For a choice of what goes to host memory, measure the device that the model is on. It needs some
            memory of it.

    Attributes:
        progress: What the planner is busy with; a model of a thousand layers takes it several seconds.
        step: The step as it is traced: `first_calls_only` if it fails or gives no loss when it runs again.
    """

    def __init__(self, step: TracedStep, *, measures_rates: bool = False) -> None:
        self.progress = PlanningProgress()
        self.step = step
        self._measures_rates = measures_rates
        self._notes: tuple[str, ...] = ()
        self._groups: dict[tuple[Any, ...], _PlanningGroup] = {}
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
        found = self.step_in_chunks() if options.loss_head == "auto" and not options.heads else None
        if found is not None and _saves(found):
            return self._with_loss_in_chunks(found, options, nearest=nearest)
        return self._plan(options, nearest=nearest)

    def _with_loss_in_chunks(self, found: LossInChunks, options: CheckpointOptions, *, nearest: bool) -> CheckpointPlan:
        """Return the plan with a loss in chunks; without it where a budget needs no change at all."""
        limit, plain = options.budget_bytes, found.plain
        if options.budget_share is not None:
            limit = plain.static_bytes + int(options.budget_share * plain.activation_bytes)
        if limit is not None and plain.peak_bytes <= limit:
            return self._plan(options, nearest=nearest)
        within = _around(found, options, limit)
        try:
            plan = self._plan(within, nearest=nearest)
        except BudgetTooSmallError as error:
            if not nearest or options.budget_share is None or not error.reachable_bytes:
                raise
            plan = self._plan(replace(within, budget_bytes=error.reachable_bytes), nearest=nearest)
        note = f"the loss of {' and '.join(found.names)} is computed in chunks of {found.chunk_rows} rows: {found.size}"
        return replace(
            plan,
            plain=plain,
            planned=plan.planned or found.cost,
            refused=None,
            notes=(note, *plan.notes),
            heads=found.names,
        )

    def step_in_chunks(self) -> LossInChunks | None:
        """Trace the step with its loss in chunks, once; return None if it has no cross-entropy of a linear layer."""
        if not self._looked_for_head:
            self._looked_for_head = True
            self.progress.doing = "tracing a step with its loss in chunks"
            # The user's step may do anything with logits that are not there; what is wrong with it is found later.
            with suppress(Exception):
                self._in_chunks = loss_in_chunks(self.step)
        return self._in_chunks

    def _plan(self, options: CheckpointOptions, *, nearest: bool) -> CheckpointPlan:
        if not find_chains(self.step.model, options) and (not _takes_all(options) or not self._finds_modules(options)):
            message = nothing_found_message(self.step.model, options)
            if not options.heads:
                warnings.warn(message, NothingToApplyTo, stacklevel=4)
            return CheckpointPlan((), None, None, message)
        if options.bn_dropout == "auto":
            return self._skipping_or_recomputing(options, nearest=nearest)
        try:
            plan = self._best(options)
        except BudgetTooSmallError as error:
            if not nearest or options.budget_share is None or not error.reachable_bytes:
                raise
            plan = self._best(replace(options, budget_share=None, budget_bytes=error.reachable_bytes))
        cached = modules_with_caches(self.step.model)
        if plan.refused is None and cached:
            names = ", ".join(sorted({type(one).__name__ for one in cached.values()}))
            plan = replace(plan, notes=(f"use_cache of {names} is off in training, where blocks run twice",))
        plan = replace(plan, notes=(*plan.notes, *self._notes))
        if plan.refused is not None and not options.has_budget and not options.heads:
            return replace(plan, refused=f"{plan.refused} {self._alternatives(options)}")
        return plan

    def least_peak(self, options: CheckpointOptions) -> int | None:
        """Return the lowest peak of any plan in bytes, as computed from the profile: some percent off a traced one.

        None where only a trace can tell: a plan recomputes a layer in all its calls, but the profile counts the first;
        and where the estimate of the plain step is too high, those of plans may be, too.
        """
        found = self.step_in_chunks() if options.loss_head == "auto" else None
        if found is not None and _saves(found):
            options = _around(found, options, options.budget_bytes)
        widest = self._all_chains(replace(options, bn_dropout="recompute"))
        return _GroupPlan(self._group(widest, options.heads), self._all_chains(options), options).least_peak()

    def with_advice(self, plan: CheckpointPlan) -> CheckpointPlan:
        """Return the plan, with a note where much of its peak is what it does not lower: a language model's logits."""
        found = None if plan.planned is None or plan.heads else self.step_in_chunks()
        if found is None or plan.planned is None or found.logits[2] < _WORTH_A_NOTE * plan.planned.peak_bytes:
            return plan
        if found.read_by:
            note = f"{found.size}, and {found.read_by} reads them, so that their loss is not computed in chunks"
        else:
            note = f'{found.size}; with loss_head="auto" their loss is computed in chunks'
        return replace(plan, notes=(*plan.notes, note))

    def _skipping_or_recomputing(self, options: CheckpointOptions, *, nearest: bool) -> CheckpointPlan:
        """Return a plan that runs no BatchNorm or Dropout layer twice; if there is none, a plan that does."""
        try:
            plan = self.plan(replace(options, bn_dropout="skip"))
        except BudgetTooSmallError:
            plan = None
        if plan is not None and plan.refused is None:
            return plan
        other = self.plan(replace(options, bn_dropout="recompute"), nearest=nearest)
        if plan is not None and other.refused is not None:
            return plan
        note = "BatchNorm and Dropout layers are recomputed too: without them no plan is worth its cost or fits"
        return replace(other, notes=(*other.notes, note))

    def _best(self, options: CheckpointOptions) -> CheckpointPlan:
        """Return the best plan."""
        if not _takes_all(options):
            return self._best_of_depths(options)
        # A profile covers whatever some `bn_dropout` allows, so that all of them share it.
        widest = self._all_chains(replace(options, bn_dropout="recompute"))
        return _plan_of_group(self._group(widest, options.heads), self._all_chains(options), options)

    def _all_chains(self, options: CheckpointOptions) -> list[Chain]:
        chains = find_chains(self.step.model, options)
        return [*chains, *find_modules(self.step.model, chains, options)]

    def _finds_modules(self, options: CheckpointOptions) -> bool:
        chains = self._all_chains(replace(options, bn_dropout="recompute"))
        return bool(chains) and bool(rows_of(self._group(chains, options.heads).profile, chains))

    def _best_of_depths(self, options: CheckpointOptions) -> CheckpointPlan:
        """Plan each depth of nesting of chains, and return the best plan: for `segments`, and for modules by name.

        What lies within the layers of the outermost chains is planned only if these save little.
        """
        best: CheckpointPlan | None = None
        too_small: BudgetTooSmallError | None = None
        widest = depths(find_chains(self.step.model, replace(options, bn_dropout="recompute")))
        for profiled, chains in zip(widest, depths(find_chains(self.step.model, options)), strict=True):
            try:
                plan = _plan_of_group(self._group(profiled, options.heads), chains, options)
            except BudgetTooSmallError as error:
                if too_small is None or error.reachable_bytes < too_small.reachable_bytes:
                    too_small = error
                continue
            if best is None or self._is_better(plan, best, options):
                best = plan
            if plan.refused is None and (options.segments is not None or (options.has_budget and _saves_a_third(plan))):
                break
        if best is None:
            assert too_small is not None
            raise too_small
        return best

    def _is_better(self, plan: CheckpointPlan, other: CheckpointPlan, options: CheckpointOptions) -> bool:
        if plan.refused is not None or other.refused is not None:
            return plan.refused is None
        if options.segments is None and not options.has_budget:
            return self._product(plan) < self._product(other)
        return (plan.peak_bytes or 0) < (other.peak_bytes or 0)

    def _product(self, plan: CheckpointPlan) -> int:
        """Return the product of memory and operations, which "auto" keeps low, as traced."""
        assert plan.planned is not None
        resident = plan.planned.resident_bytes
        return max(plan.planned.peak_bytes - resident, 1) * plan.planned.operations

    def _group(self, chains: Sequence[Chain], heads: tuple[str, ...]) -> _PlanningGroup:
        key = heads, *((chain.name, chain.layers, chain.forced, tuple(chain.outside)) for chain in chains)
        if key not in self._groups:
            n_layers = sum(len(chain.layers) for chain in chains)
            self.progress.doing = f"tracing a step layer by layer, {n_layers} of them"
            profile = self._profile(chains, heads)
            self._groups[key] = _PlanningGroup(self.step, profile, self.progress, heads, self._measures_rates)
        return self._groups[key]

    def _profile(self, chains: Sequence[Chain], heads: tuple[str, ...]) -> StepProfile:
        try:
            known = self._in_chunks.cost if heads and self._in_chunks is not None else None
            return profile_step(self.step, chains, heads, known)
        except StepDiffersError as error:
            if self.step.first_calls_only:
                raise
            # A step that counts its calls may expect a number of them, or give a loss at every second one alone.
            self.step = replace(self.step, first_calls_only=True)
            self._notes = (f"{error}, {_AS_AT_FIRST}",)
            return self._profile(chains, heads)

    def _alternatives(self, options: CheckpointOptions) -> str:
        """Describe what each other `bn_dropout` would give."""
        found = []
        for other in get_args(BnDropout):
            if other in {options.bn_dropout, "auto"}:
                continue
            plan = self._best(replace(options, bn_dropout=other))
            result = (
                "no lower peak either"
                if plan.refused
                else f"a peak of {format_size(plan.peak_bytes or 0)}, {plan.extra_operations:.0%} more operations"
            )
            found.append(f'bn_dropout="{other}" would give {result}')
        return f"{'; '.join(found)}."


class _PlanningGroup:
    """The profile of chains that are planned together, and everything that was computed from it."""

    def __init__(
        self,
        step: TracedStep,
        profiled: StepProfile,
        progress: PlanningProgress,
        heads: tuple[str, ...],
        measures_rates: bool,
    ) -> None:
        self.profile = profiled
        self._measures_rates = measures_rates
        self._step, self._heads = step, heads
        self._progress = progress
        self._solved: list[tuple[tuple[list[Unit], list[Row]], OptimalRanges]] = []
        self._predicted: dict[tuple[Any, ...], StepCost] = {}

    @cached_property
    def rates(self) -> DeviceRates:
        """The rates of the device that the step runs on."""
        parameter = next(self._step.model.parameters())
        dtype = AUTOCAST_TYPES.get(getattr(self._step.trainer, "precision", ""), parameter.dtype)
        return DeviceRates.of(parameter.device, dtype) if self._measures_rates else DeviceRates.assumed(dtype)

    @property
    def host_bytes(self) -> float:
        """The part of the host's memory that is free for tensors of this process."""
        return free_host_bytes(self._step.trainer)

    def optimal(self, units: list[Unit], rows: list[Row]) -> OptimalRanges:
        """Return all optimal plans of these units. The last ones are kept; of many units they can take 100 MB."""
        for known, optimal in self._solved:
            if known == (units, rows):
                return optimal
        # A little above the plain peak, because sizes are rounded.
        self._progress.doing = f"choosing what to recompute among {len(units)} layers"
        limit = int(1.02 * max(estimate(units, ()).peak_bytes, self.profile.plain.peak_bytes))
        # With and without BatchNorm and Dropout in turn.
        self._solved = self._solved[-1:] if len(units) <= _FEW_UNITS else []
        self._solved.append(((units, rows), OptimalRanges(units, limit, rows)))
        return self._solved[-1][1]

    def predicted(self, plans: Sequence[ChainPlan]) -> StepCost:
        """Return the memory and operations of the step under these plans, traced at most once."""
        key = tuple((plan.name, plan.ranges, plan.offloaded) for plan in plans if plan.is_applied)
        if not key:
            return self.profile.plain
        if key not in self._predicted:
            self._progress.doing = "tracing a step under the plan"
            self._predicted[key] = predict(self._step, plans, self._heads)
        return self._predicted[key]


class _GroupPlan:
    """Makes the plan of a group of chains for one set of options.

    Args:
        group: The group.
        chains: Its chains with what these options leave out.
        options: The options.
        offloaded: The layers whose kept tensors go to host memory.
        again: Whether these are recomputed, so that only their inputs go there, and nothing else is.
    """

    def __init__(
        self,
        group: _PlanningGroup,
        chains: Sequence[Chain],
        options: CheckpointOptions,
        offloaded: tuple[OffloadedLayer, ...] = (),
        *,
        again: bool = False,
    ) -> None:
        self._group = group
        self._chains = chains
        self._options = options
        self._plain = group.profile.plain
        self._units = units_under(group.profile, chains)
        self.rows = rows_of(group.profile, chains)
        self._offloaded, self._again = offloaded, again
        if offloaded:
            self._units = units_with_offload(self._units, offloaded, again=again)
            self.rows = rows_without(self.rows, offloaded)

    def make(self) -> CheckpointPlan:
        options, plain = self._options, self._plain
        if options.segments is not None:
            return _or_refused(self._traced(cut(self._units, options.segments)), least_saving=0.0)
        if not options.has_budget:
            return _or_refused(self._best_product(), LEAST_SAVING)
        limit = options.budget_bytes
        if limit is None:
            assert options.budget_share is not None
            limit = plain.static_bytes + int(options.budget_share * plain.activation_bytes)
        if plain.peak_bytes <= limit:
            reason = f"The plain step's peak of {format_size(plain.peak_bytes)} is within the budget."
            return CheckpointPlan(self._chain_plans((), forced=False), plain, plain, reason)
        return self._recomputing_all(limit) if self._again else self._fitting(limit)

    def _recomputing_all(self, limit: int) -> CheckpointPlan:
        """Return the plan that runs all offloaded layers again, within a limit."""
        plan = self._traced(tuple(Range(one.start, one.stop) for one in self._offloaded))
        if (plan.peak_bytes or 0) > limit:
            raise self._too_small(limit, plan)
        return plan

    def least_peak(self) -> int | None:
        plain, profile = self._plain.peak_bytes, self._group.profile
        if profile.calls_layers_again or estimate(self._units, ()).peak_bytes > (1 + _FAR_OFF) * plain:
            return None
        frontier = self._group.optimal(self._units, self.rows).frontier()
        return min((peak for peak, _ in frontier), default=plain)

    def _chain_plans(self, ranges: Ranges, *, forced: bool = True) -> tuple[ChainPlan, ...]:
        plans = chain_plans(self._group.profile, self._chains, ranges, forced=forced)
        for one in self._offloaded:
            index, at = one.place
            plans[index] = replace(plans[index], offloaded=(*plans[index].offloaded, at))
        figures = with_figures(plans, self._chains, self._group.profile, self._units, ranges)
        return tuple(_worth_showing(figures, self._group.profile))

    def _traced(self, ranges: Ranges) -> CheckpointPlan:
        plans = self._chain_plans(ranges)
        rates = self._group.rates if self._options.offload else None
        plan = CheckpointPlan(plans, self._plain, self._group.predicted(plans))
        if rates is None:
            return plan
        assert plan.planned is not None
        waits = waiting_seconds(self._group.profile.units, ranges, self._offloaded, rates, again=self._again)
        time = (plan.planned.operations + waits * rates.operations) / max(self._plain.operations, 1)
        left = sum(one.input_bytes if self._again else one.n_bytes for one in self._offloaded)
        return replace(plan, relative_time=time, host_bytes=left)

    def _best_product(self) -> CheckpointPlan:
        """Return the plan with the lowest product of memory and operations, of the few that were traced."""
        if self._again:
            return self._recomputing_all(self._plain.peak_bytes)
        optimal = self._group.optimal(self._units, self.rows)
        operations = self._plain.operations + sum(plan.extra_operations for plan in self._chain_plans(()))
        most = MOST_OPERATIONS * self._plain.operations

        def product(peak: int, operations: int) -> int:
            return max(peak - self._plain.resident_bytes, 1) * operations

        points = [(peak, operations + extra) for peak, extra in optimal.frontier()]
        allowed = [one for one in points if one[1] <= most] or points[:1]
        allowed.sort(key=lambda one: (product(*one), one[0]))
        best, least, tried = self._traced(()), INFINITE, list[int]()
        for peak, extra in allowed:
            if product(peak, extra) >= least or len(tried) == _MOST_COMPARED:
                break
            if any(abs(peak - other) < _ALIKE * peak for other in tried):
                continue
            tried.append(peak)
            plan = self._traced(optimal.best(peak) or ())
            assert plan.planned is not None
            traced = product(plan.planned.peak_bytes, plan.planned.operations)
            if traced < least and (plan.planned.operations <= most or len(tried) == 1):
                best, least = plan, traced
        return best

    def _fitting(self, limit: int) -> CheckpointPlan:
        """Return the plan with the least recomputation whose traced peak is within the limit."""
        optimal = self._group.optimal(self._units, self.rows)
        aim = float(limit)
        tried: list[CheckpointPlan] = []
        for attempt in range(_MOST_ATTEMPTS):
            ranges = optimal.best(aim)
            if ranges is None:
                break
            plan = self._traced(ranges)
            assert plan.planned is not None
            over = plan.planned.peak_bytes - limit
            if over <= 0:
                return plan
            tried.append(plan)
            aim -= over + 0.001 * 2**attempt * limit
        frontier = optimal.frontier()
        tried += [self._traced(optimal.best(frontier[-1][0]) or ())] if frontier else []
        smallest = min(tried, key=lambda plan: plan.peak_bytes or 0, default=None)
        if smallest is not None and smallest.planned is not None and smallest.planned.peak_bytes <= limit:
            return smallest
        raise self._too_small(limit, smallest)

    def _too_small(self, limit: int, smallest: CheckpointPlan | None) -> BudgetTooSmallError:
        options = self._options
        reachable = None if smallest is None else smallest.planned
        budget = options.budget_share if options.budget_bytes is None else format_size(limit)
        message = f"No plan fits memory_budget={budget} (a peak of {format_size(limit)}). "
        if smallest is not None and reachable is not None:
            share = reachable.activation_bytes / max(self._plain.activation_bytes, 1)
            message += (
                f"The smallest reachable peak is {format_size(reachable.peak_bytes)}, {share:.3g} of the plain step's "
                f"activations, by recomputing {smallest.recomputed()} ({smallest.extra_operations:.0%} more "
                "operations). "
            )
        ways = ["raise the budget"]
        if options.budget_share is None:  # a share of the activations is no easier to reach with a smaller batch
            ways.append("make the batch smaller")
        if options.bn_dropout == "skip":
            ways.append('let layers of BatchNorm and Dropout be recomputed, if there are any (bn_dropout="auto")')
        if options.include is not None or len(options.exclude) > len(options.heads):
            ways.append("let include and exclude leave more to recompute")
        message += f"Next: {' or '.join(ways)}."
        return BudgetTooSmallError(message, 0 if reachable is None else reachable.peak_bytes)


def _plan_of_group(group: _PlanningGroup, chains: Sequence[Chain], options: CheckpointOptions) -> CheckpointPlan:
    """Return the best plan of a group, with tensors in host memory where the options allow it and it gains.

    That is the plan which takes least time within a budget. Without a budget it has the lowest product of memory and
    time, of those that take at most a third more time than the plain step.
    """
    first = _GroupPlan(group, chains, options)
    if not options.offload:
        return first.make()
    host = options.host_bytes if options.host_bytes is not None else group.host_bytes
    layers = offloadable(group.profile, chains, first.rows)
    ways = [_GroupPlan(group, chains, options, taken) for taken in choices(layers, host)]
    if options.offload == "auto":
        again = tuple(one for one in layers if one.may_run_again)
        ways = [first, *ways, *([_GroupPlan(group, chains, options, again, again=True)] if len(again) > 1 else [])]
    made: list[CheckpointPlan] = []
    errors: list[BudgetTooSmallError] = []
    for way in ways:
        try:
            made.append(way.make())
        except BudgetTooSmallError as error:
            errors.append(error)
    if not made and errors:
        raise min(errors, key=lambda error: error.reachable_bytes)

    def worth(plan: CheckpointPlan) -> tuple[Any, ...]:
        time = plan.relative_time or 1.0
        if options.has_budget:
            return plan.refused is not None, time, plan.peak_bytes
        memory = max((plan.peak_bytes or 0) - group.profile.plain.resident_bytes, 1)
        return plan.refused is not None, time > MOST_OPERATIONS, memory * time

    best = min(made, key=worth, default=None)
    if best is None:
        return first.make()
    if not best.host_bytes:
        return best
    note = (
        f"{format_size(best.host_bytes)} of what layers keep goes to host memory; a step is estimated to take "
        f"{best.relative_time:.2f} of the plain step's time ({group.rates})"
    )
    return replace(best, notes=(*best.notes, note))


def _takes_all(options: CheckpointOptions) -> bool:
    """Return whether all modules are candidates, and not only chains or what patterns name."""
    return options.include is None and options.segments is None


def _worth_showing(plans: Sequence[ChainPlan], profile: StepProfile) -> Iterator[ChainPlan]:
    """Yield the plans that recompute something, the outermost Sequentials, and what only running showed not to."""
    left_out = {plans[index].name for index, _ in profile.outside if plans[index].is_module}
    chains = {plan.name for plan in plans if not plan.is_module}
    for plan in plans:
        others = left_out if plan.is_module else chains
        if plan.is_applied or (plan.name in others and others.isdisjoint(ancestors(plan.name))):
            yield plan


def _or_refused(plan: CheckpointPlan, least_saving: float) -> CheckpointPlan:
    """Return the plan, or the same without its ranges if it does not lower the peak by this share."""
    assert plan.plain is not None
    assert plan.planned is not None
    was, now = plan.plain.peak_bytes, plan.planned.peak_bytes
    recomputes = any(chain.is_applied for chain in plan.chains)
    if recomputes and now < was * (1 - least_saving):
        return plan
    if not recomputes:
        reason = f"No plan lowers the predicted peak of {format_size(was)} at an acceptable cost."
    elif now >= was:
        reason = f"The plan does not lower the peak: {format_size(was)} without it, {format_size(now)} with it."
    else:
        reason = f"The plan saves too little: {format_size(was)} without it, {format_size(now)} with it."
    return CheckpointPlan(tuple(chain.unchanged() for chain in plan.chains), plan.plain, plan.plain, reason)


def _saves(found: LossInChunks) -> bool:
    """Return whether a loss in chunks is worth it."""
    return bool(found.names) and found.cost.peak_bytes < (1 - LEAST_SAVING) * found.plain.peak_bytes


def _around(found: LossInChunks, options: CheckpointOptions, limit: int | None) -> CheckpointOptions:
    """Return the options for the rest of a step whose loss is computed in chunks, within a peak."""
    exclude = (*options.exclude, *found.names)
    return replace(options, exclude=exclude, heads=found.names, budget_share=None, budget_bytes=limit)


def _saves_a_third(plan: CheckpointPlan) -> bool:
    assert plan.plain is not None
    assert plan.planned is not None
    return plan.planned.activation_bytes < 2 / 3 * plan.plain.activation_bytes
