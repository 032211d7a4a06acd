"""Planning: tensors are fake wherever the user keeps them, and the user's module is restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memtools import plan_checkpoints
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode


@dataclass
class Statistics:
    mean: torch.Tensor


class Scale:
    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor


FACTOR = torch.full((64,), 0.5)
HOLDERS: dict[str, tuple[Any, Any]] = {
    "attribute": (FACTOR, lambda held: held),
    "dictionary": ({"a": FACTOR}, lambda held: held["a"]),
    "nested": ({"a": [(FACTOR,)]}, lambda held: held["a"][0][0]),
    "data class": (Statistics(FACTOR), lambda held: held.mean),
    "object": (Scale(FACTOR), lambda held: held.factor),
    "parameter in a list": ([nn.Parameter(FACTOR)], lambda held: held[0]),
}


class Model(nn.Module):
    def __init__(self, holder: str) -> None:
        super().__init__()
        self.held, self.get = HOLDERS[holder]
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x * self.get(self.held))
        return out


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_are_fake_wherever_they_are_held(holder):
    model = Model(holder)
    before = model.held
    with fake_mode(), borrowed([model], TensorExchange()):
        held = model.get(model.held)
    assert isinstance(held, FakeTensor)
    assert held.shape == (64,)
    assert model.held is before
    assert not isinstance(model.get(model.held), FakeTensor)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_plan_is_found_wherever_tensors_are_held(holder):
    plan = plan_checkpoints(Model(holder), torch.zeros(256, 64))
    assert plan.refused is None
    assert [len(chain.ranges) for chain in plan.chains] == [
        len(chain.ranges) for chain in plan_checkpoints(Model("attribute"), torch.zeros(256, 64)).chains
    ]


def test_a_tensor_that_is_held_twice_is_one_fake():
    model = Model("dictionary")
    model.again = [model.held["a"]]
    with fake_mode(), borrowed([model], TensorExchange()):
        assert model.again[0] is model.held["a"]
