"""Backward may pass through a planned model more than once, as through the plain one."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from tests.checkpointing.models import SMALL, harshest, same_seed


def gradients_twice(model, x):
    out = model(x).square().mean()
    first = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(out, [x, *model.parameters()])
    return [*first, *second]


def retained(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [one.grad for one in model.parameters()]


def penalized(model, x):
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.norm()).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize("how", [gradients_twice, retained, penalized])
@pytest.mark.parametrize("name", SMALL)
def test_a_second_backward_gives_the_bits_of_the_plain_model(name, how):
    make, shape = SMALL[name]
    ends = []
    for recompute in (False, True):
        model = same_seed(make)
        plans = harshest(model, bn_dropout="recompute") if recompute else []
        assert not recompute or any(plan.ranges for plan in plans)
        with AppliedPlan(model, plans):
            torch.manual_seed(1)
            x = torch.randn(shape, requires_grad=True)
            # A first layer in place could not run on a leaf.
            found = how(model, x)
        ends.append([*found, *model.state_dict().values(), torch.get_rng_state()])
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
