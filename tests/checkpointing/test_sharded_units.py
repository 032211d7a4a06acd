"""Plans for models that FSDP 2 shards: ranges stay within one sharded module. One process is a group of its own."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.checkpointing.sharded_units import within_units
from lightning_memtools.simulation.step_trace import TracedStep


@pytest.fixture
def mesh(tmp_path):
    """The only rank, over gloo."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def block():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


class Blocks(nn.Module):
    """Blocks in a Sequential between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = (
            nn.Linear(4, 32),
            nn.Sequential(*(block() for _ in range(6))),
            nn.Linear(32, 1),
        )

    def forward(self, x):
        return self.last(self.body(self.first(x)))


def planned(model):
    step = TracedStep(
        model, torch.empty(512, 4), lambda model, x: model(x).sum(), (torch.optim.AdamW(model.parameters()),)
    )
    plan = StepPlanner(step).plan(CheckpointOptions.parse(segments=3))
    assert plan.refused is None
    return plan, step


def test_a_range_of_several_sharded_modules_is_cut_into_one_for_each(mesh):
    plain, _ = planned(Blocks())
    model = Blocks()
    for one in model.body:
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan, step = planned(model)
    assert plan.plain == plain.plain  # the model is whole in the trace
    assert any(one.stop - one.start > 1 for chain in plan.chains for one in chain.ranges)
    cut = within_units(plan, step)
    recomputed = {chain.name for chain in cut.chains if chain.ranges}
    assert recomputed <= {f"body.{at}" for at in range(6)}
    assert recomputed
    assert all(chain.is_module for chain in cut.chains if chain.ranges)
    assert plan.plain.peak_bytes > cut.planned.peak_bytes
    assert "the peaks are those of one device that holds the whole model" in cut.notes[0]


def test_gradients_are_those_of_the_plain_step_and_the_trace_leaves_sharding_as_it_was(mesh):
    gradients = []
    for with_plan in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        for one in model.body:
            fully_shard(one, mesh=mesh)
        fully_shard(model, mesh=mesh)
        hooks = [dict(one._forward_pre_hooks) for one in model.modules()]
        if with_plan:
            plan, step = planned(model)
            within_units(plan, step).apply(model)
        assert [dict(one._forward_pre_hooks) for one in model.modules()] == hooks
        model(torch.ones(8, 4)).sum().backward()
        gradients.append([one.grad.to_local() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
