"""Keeps recomputation within the modules that FSDP 2 shards, so that no parameter is gathered a third time.

A sharded module gathers its parameters for its forward and once more for its backward. What runs again inside of it
then finds them gathered. A range of several sharded modules would run all of them again before the backward of the
last, and gather the others for that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from lightning_memtools._torch import is_fsdp_module
from lightning_memtools.checkpointing.chains import is_within
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, CheckpointOptionsError
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range
from lightning_memtools.checkpointing.step_profile import predict
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.step_trace import TracedStep

_NOTE = (
    "the peaks are those of one device that holds the whole model: a rank of FSDP 2 holds a part of the parameters, "
    "gradients and optimizer state, and the same activations"
)


def refuse_peaks(options: CheckpointOptions, model: nn.Module) -> None:
    """Refuse a budget that is a peak for a model that is sharded: a plan knows the activations of a rank, no more.

    Raises:
        CheckpointOptionsError: It is one.
    """
    if options.budget_bytes is not None and any(map(is_fsdp_module, model.modules())):
        raise CheckpointOptionsError(
            f"memory_budget is a peak of {format_size(options.budget_bytes)}, and under FSDP 2 a plan does not know "
            "what else a rank holds: give a share of the activations, such as memory_budget=0.5."
        )


def within_units(plan: CheckpointPlan, step: TracedStep) -> CheckpointPlan:
    """Return the plan with ranges of several sharded modules cut into one for each; without such modules, the plan."""
    sharded = [name for name, module in step.model.named_modules() if is_fsdp_module(module)]
    if not sharded or plan.refused is not None:
        return plan
    chains = tuple(new for chain in plan.chains for new in _cut(chain, sharded, step.model))
    ranges = [[chain.ranges for chain in chains], [chain.ranges for chain in plan.chains]]
    planned = plan.planned if ranges[0] == ranges[1] else predict(step, chains)
    return replace(plan, chains=chains, planned=planned, notes=(*plan.notes, _NOTE))


def _cut(chain: ChainPlan, sharded: Sequence[str], model: nn.Module) -> Iterator[ChainPlan]:
    """Yield the chain with what of its ranges holds no sharded module, and the sharded modules as chains of one."""
    holding = [any(is_within(name, layer) for name in sharded) for layer in chain.layers]
    if not any(holding[at] for one in chain.ranges for at in range(one.start, one.stop)):
        yield chain
        return
    kept: list[Range] = []
    units: list[str] = []
    for one in chain.ranges:
        if not any(holding[one.start : one.stop]):
            kept.append(one)
            continue
        start = one.start
        for at in range(one.start, one.stop):
            if holding[at]:
                kept += [Range(start, at)] if start < at else []
                start = at + 1
                # Innermost: a sharded module that holds another would gather that one again.
                units += [
                    name
                    for name in sharded
                    if is_within(name, chain.layers[at])
                    and not any(is_within(other, name) for other in sharded if other != name)
                    and "forward" not in vars(model.get_submodule(name))
                ]
        kept += [Range(start, one.stop)] if start < one.stop else []
    if chain.is_module and units == [chain.name]:
        yield chain
        return
    yield replace(chain, ranges=() if chain.is_module else tuple(kept), kept_bytes=chain.kept_bytes)
    for name in units:
        yield ChainPlan(name, (name,), (Range(0, 1),), is_module=True)
