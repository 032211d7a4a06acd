"""Ranges that keep what their matrix products give train the same bits, and compute these only once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import find_chains
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.memory_model import (
    ChainPlan,
    Range,
)
from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.memory.virtual import VirtualDevice
from tests.checkpointing.models import encoder, same_seed

SETS = [(1, 2), (0, 1, 2)]
"""Of a block's products: the second and third, and the first three"""


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


def one_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("kept", SETS)
@pytest.mark.parametrize(
    "make", [encoder, lambda: nn.Sequential(Overwriting(), Overwriting())], ids=["encoder", "in place"]
)
def test_training_is_bitwise_that_of_the_plain_model(make, kept):
    ends = []
    for plans in ([], planned(same_seed(make), kept)):
        model = same_seed(make)
        with AppliedPlan(model, plans, prove=True) as applied:
            torch.manual_seed(1)
            found = one_backward(model, torch.randn(2, 10, 32, requires_grad=True))
        assert applied.differing == {}
        ends.append([*found, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


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
