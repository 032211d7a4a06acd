"""Models that nobody here wrote are planned by default, trained bit for bit as without, and need what was predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.memory.virtual import VirtualDevice
from tests.checkpointing.foreign_models import FOREIGN, LossOf, made


def three_steps(model: LossOf, batch: dict[str, Tensor], *, bf16: bool) -> list[Tensor]:
    """The losses, gradients, weights, buffers and random numbers of three steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        optimizer.step()
    return [*found, *model.state_dict().values(), *model.buffers(), torch.get_rng_state()]


def assert_bitwise_equal(name: str, plan: CheckpointPlan, *, bf16: bool) -> None:
    model, batch = made(name)
    plain = three_steps(copy.deepcopy(model), batch, bf16=bf16)
    applied = plan.apply(model)
    planned = three_steps(model, batch, bf16=bf16)
    applied.remove()
    assert applied.differing == {}
    assert len(plain) == len(planned)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def measured_peak(model: LossOf, batch: dict[str, Any], plan: CheckpointPlan) -> int:
    """The simulated allocator's peak over three real steps, after whose first everything was proved."""
    with VirtualDevice() as device, plan.apply(model):
        device.track(model, batch)
        for at in range(3):
            loss = model(batch)
            model.zero_grad()
            loss.backward()
            if at == 0:
                device.reset_peaks()
        peak = device.stats().peak_allocated
    assert peak is not None
    return peak


@pytest.mark.parametrize("name", FOREIGN)
def test_training_is_bitwise_the_same_and_the_peak_is_the_predicted_one(name):
    model, batch = made(name)
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    assert plan.refused is None
    assert plan.peak_bytes < 0.99 * plan.plain_peak_bytes
    assert measured_peak(model, batch, plan) == pytest.approx(plan.peak_bytes, rel=0.01)
    for bf16 in (False, True):
        assert_bitwise_equal(name, plan, bf16=bf16)
