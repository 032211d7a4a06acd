"""The inputs of recomputed layers go to host memory and come back: the same numbers, less of the device."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from lightning_memtools import GradientCheckpointing, VirtualDevice, plan_checkpoints
from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan, Range
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.step_trace import TracedStep
from tests.checkpointing.models import Block, same_seed


def blocks(n: int = 6, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[Block(width, 4, 0.1) for _ in range(n)])


def results(*, offload: bool, recompute: bool = True) -> tuple[list[torch.Tensor], int]:
    """Return accumulated gradients, the state of the random numbers, and the peak on a simulated device."""
    ranges = tuple(Range(at, at + 1) for at in range(6)) if recompute else ()
    with VirtualDevice("1GiB", cuda_like=True) as device:
        model = same_seed(blocks)
        given = torch.randn(16, 64, 64)
        with AppliedPlan(model, [ChainPlan("", tuple("012345"), ranges)], offload=offload):
            for _ in range(2):
                model(given).square().mean().backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        return [*grads, torch.get_rng_state()], device.stats().peak_allocated or 0


def test_results_are_bit_for_bit_those_of_the_plain_step_with_less_memory():
    (plain, _), (kept, with_inputs), (found, without) = (
        results(offload=False, recompute=False),
        results(offload=False),
        results(offload=True),
    )
    assert all(torch.equal(one, other) for other in (kept, found) for one, other in zip(plain, other, strict=True))
    # Of six inputs the first is the batch, and the last block's is there while it runs again.
    assert with_inputs - without >= 4 * 16 * 64 * 64 * 4


def test_a_budget_that_recomputation_alone_does_not_reach_fits():
    x = torch.empty(16, 64, 64)
    with pytest.raises(ValueError, match="smallest reachable"):
        plan_checkpoints(blocks(24), x, memory_budget=0.05)
    plan = plan_checkpoints(blocks(24), x, memory_budget=0.05, offload=True)
    assert plan.planned.activation_bytes <= 0.05 * plan.plain.activation_bytes
    assert "the inputs of what is recomputed are kept in host memory" in plan.notes


def test_there_is_no_limit_of_host_memory_to_give():
    for function in (plan_checkpoints, GradientCheckpointing):
        assert "host_memory" not in inspect.signature(function).parameters


@pytest.mark.cuda_memory
def test_its_peak_is_the_measured_one():
    model, given = blocks(8, 512).cuda(), torch.randn(8, 256, 512, device="cuda")
    step = TracedStep(model, (given,), lambda m, a: m(*a).square().mean(), device="cuda")
    plan = StepPlanner(step).plan(CheckpointOptions.parse(memory_budget=0.3, bn_dropout="recompute", offload=True))
    with AppliedPlan(model, plan.chains, offload=True):
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = model(given).square().mean()
            model.zero_grad()
            loss.backward()
        assert torch.cuda.max_memory_allocated() == pytest.approx(plan.peak_bytes, rel=0.01)
