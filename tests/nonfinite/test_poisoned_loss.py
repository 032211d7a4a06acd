"""A bad loss makes all gradients NaN, so that the other ranks know of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools.nonfinite.update_flag import poison


def gradients(loss_of, *, poisoned: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    loss = loss_of(net(torch.randn(5, 3)))
    if poisoned:
        poison(loss)
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_good_loss_leaves_every_bit_alone(dtype):
    plain, poisoned = (gradients(lambda out: out.square().mean().to(dtype), poisoned=p) for p in (False, True))
    for one, other in zip(plain, poisoned, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_loss_makes_finite_gradients_nan(bad):
    plain, poisoned = (gradients(lambda out: out.mean() + bad, poisoned=p) for p in (False, True))
    assert all(torch.isfinite(each).all() for each in plain)
    assert any(each.isnan().any() for each in poisoned)


def test_a_loss_without_a_graph_is_left_alone():
    poison(torch.tensor(torch.nan))
