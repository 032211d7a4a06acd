"""Ranges that keep what their matrix products give train the same bits, and compute these only once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import find_chains
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import chain_plans
from lightning_memtools.checkpointing.kept_products import is_product
from lightning_memtools.checkpointing.memory_model import (
    ChainPlan,
    Range,
    estimate,
    kept_by_unit,
    ranges_with_products,
)
from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.checkpointing.step_profile import StepProfile, predict, profile_step
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.step_trace import TracedStep
from tests.checkpointing.models import encoder, same_seed

aten = torch.ops.aten
SETS = [(0,), (1, 2), (0, 1, 2)]
"""Of a block's products: the first one, the next two, and all of these"""


class Overwriting(nn.Module):
    """Its first product is overwritten, by an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(F.dropout(F.relu_(self.widen(x)), 0.2)).tanh()
        return out


def planned(model: nn.Module, kept: tuple[int, ...]) -> list[ChainPlan]:
    """Every layer keeps these products."""
    (chain,) = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]
    return [ChainPlan(chain.name, chain.layers, tuple(Range(at, at + 1, (), kept) for at in range(len(chain.layers))))]


def profiled(model: nn.Module, x: Tensor) -> tuple[StepProfile, TracedStep]:
    step = TracedStep(model, (x,), lambda copy, args: copy(*args))
    return profile_step(step, find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]), step


def one_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]


def two_backwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return [*first, *torch.autograd.grad(loss, [x, *model.parameters()])]


def penalized(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return list(torch.autograd.grad(loss + slope.norm(), list(model.parameters())))


@pytest.mark.parametrize("how", [one_backward, two_backwards, penalized])
@pytest.mark.parametrize("kept", SETS)
@pytest.mark.parametrize(
    "make", [encoder, lambda: nn.Sequential(Overwriting(), Overwriting())], ids=["encoder", "in place"]
)
def test_training_is_bitwise_that_of_the_plain_model(make, kept, how):
    ends = []
    for plans in ([], planned(same_seed(make), kept)):
        model = same_seed(make)
        with AppliedPlan(model, plans, prove=True) as applied:
            torch.manual_seed(1)
            found = how(model, torch.randn(2, 10, 32, requires_grad=True))
        assert applied.differing == {}
        ends.append([*found, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("kept", SETS)
def test_products_that_are_kept_run_once(kept):
    model, x = same_seed(lambda: encoder(2, 0.0)), torch.randn(2, 10, 32)
    measured, _ = profiled(model, x)
    spared = sum(unit.products[at].operations for unit in measured.units if unit.products for at in kept)
    flops = []
    for plans in (planned(model, ()), planned(model, kept)):
        with AppliedPlan(model, plans), FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == spared > 0


def test_the_estimate_of_ranges_that_keep_products_is_that_of_the_traced_step():
    model, x = encoder(4, 0.1), torch.empty(16, 24, 32)
    measured, step = profiled(model, x)
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]
    start, stop = measured.spans[0, 1]
    options = ranges_with_products(measured.units, start, stop)
    # The best one, the best two, ...: of seven products all but the last, whose result nothing needs.
    assert [len(one.kept) for one in options] == [1, 2, 3, 4, 5, 6]
    for one in options:
        every = [Range(*measured.spans[0, at], (), one.kept) for at in range(4)]
        plans = chain_plans(measured, chains, tuple(every))
        found, traced = estimate(measured.units, tuple(every)), predict(step, plans)
        assert found.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.01)
        assert found.extra_operations == traced.operations - measured.plain.operations
        assert sum(kept_by_unit(measured.units, tuple(every))) == found.kept_bytes


def test_a_product_that_is_overwritten_or_given_on_as_the_input_is_not_offered():
    measured, _ = profiled(nn.Sequential(nn.Linear(32, 32), Overwriting()), torch.empty(8, 32))
    at = measured.places.index((0, 1))
    first, second = measured.units[at].products
    assert not first.may_be_kept
    assert second.may_be_kept
    assert not second.in_tail  # tanh keeps its result after it
    assert ranges_with_products(measured.units, at, at + 1) == [Range(at, at + 1, (), (1,))]


def test_attention_that_drops_values_is_no_product():
    heads = [torch.empty(1, 2, 3, 4, device="meta")] * 3
    attention = aten._scaled_dot_product_efficient_attention.default
    assert is_product(attention, (*heads, None, True), {})
    assert is_product(attention, (*heads, None, True, 0.0), {})
    assert not is_product(attention, (*heads, None, True, 0.1), {})
    assert not is_product(attention, (*heads, None, True), {"dropout_p": 0.1})
    assert is_product(aten.mm.default, (), {})
    assert not is_product(aten.tanh.default, (), {})


def test_a_mild_budget_keeps_products_for_next_to_no_computation():
    model, x = same_seed(lambda: encoder(6, 0.1)), torch.randn(16, 24, 32)
    plan = plan_checkpoints(model, x, memory_budget=0.6, bn_dropout="recompute")
    ranges = [one for chain in plan.chains for one in chain.ranges]
    assert any(one.kept for one in ranges)
    assert plan.extra_operations < 0.03
    assert "but for" in str(plan)
    with VirtualDevice() as device, plan.apply(model):
        device.track(model, x)
        for at in range(3):
            loss = model(x).sum()
            model.zero_grad()
            loss.backward()
            if at == 0:
                device.reset_peaks()
        assert device.stats().peak_allocated == pytest.approx(plan.peak_bytes, rel=0.01)
