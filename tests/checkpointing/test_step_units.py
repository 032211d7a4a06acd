"""Peaks of plans, by the model of memory, by a traced step and by PyTorch's own allocator."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.tracer import StepRequest
from tests.checkpointing.models import Block


def dense() -> tuple[nn.Module, torch.Tensor, type[torch.optim.Optimizer]]:
    return nn.Sequential(*[Block(512, 8, 0.1) for _ in range(4)]), torch.empty(16, 128, 512), torch.optim.AdamW


def sparse() -> tuple[nn.Module, torch.Tensor, type[torch.optim.Optimizer]]:
    """A model whose embedding has a sparse gradient: a row for each token, half as many bytes as the embedding has."""
    blocks = [Block(256, 8, 0.1) for _ in range(4)]
    return (
        nn.Sequential(nn.Embedding(4096, 256, sparse=True), *blocks),
        torch.zeros(16, 128, dtype=torch.long),
        torch.optim.SGD,
    )


@pytest.mark.cuda_memory
@pytest.mark.parametrize("kind", [dense, sparse])
def test_predicted_peaks_are_those_of_pytorchs_allocator(kind):
    model, batch, make_optimizer = kind()
    optimizer = make_optimizer(model.parameters())
    step = StepRequest(
        model=model, batch=batch, step=lambda copy, given: copy(given).square().mean(), optimizer=optimizer
    )
    plan = StepPlanner(step).plan(CheckpointOptions.parse(bn_dropout="recompute"))
    assert plan.plain is not None
    assert plan.planned is not None
    assert plan.planned.peak_bytes < 0.7 * plan.plain.peak_bytes
    for cost, chains in ((plan.plain, ()), (plan.planned, plan.chains)):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        on_device, given = copy.deepcopy(model).cuda(), batch.cuda()
        optimizer = make_optimizer(on_device.parameters())
        with AppliedPlan(on_device, chains):
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                loss = on_device(given).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        # The step without a plan is equal. Layers that keep products are predicted up to 0.65% too high.
        rel = 0.01 if chains else 0.005
        assert torch.cuda.max_memory_allocated() - others == pytest.approx(cost.peak_bytes, rel=rel)
        del on_device, given, optimizer, loss
