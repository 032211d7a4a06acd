"""What layers keep goes to host memory and comes back: the same numbers, less of the device, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memtools import GradientCheckpointing, VirtualDevice, plan_checkpoints
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range
from lightning_memtools.checkpointing.planning import StepPlanner
from lightning_memtools.simulation.step_trace import TracedStep
from tests.checkpointing.models import same_seed
from tests.lightning_models import trainer

MIB = 1 << 20


class Attention(nn.Module):
    """Attention whose queries, keys and values are views of one tensor."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        out: torch.Tensor = x + F.dropout(
            self.out(F.scaled_dot_product_attention(query, key, value)), 0.1, self.training
        )
        return out


class InPlace(nn.Module):
    """BatchNorm, a layer that writes in place, and Dropout."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.flatten(0, 1)).view_as(x) * x
        return out


def blocks(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[kind() for _ in range(4)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: blocks(Attention),
    "in place": lambda: blocks(InPlace),
}
RANGES = {"kept": (), "recomputed": tuple(Range(at, at + 1) for at in range(4)), "both": (Range(1, 3),)}


def plan_of(ranges: tuple[Range, ...], offloaded: tuple[int, ...] = (0, 1, 2, 3)) -> list[ChainPlan]:
    starts = tuple(at for at in offloaded if not any(one.start < at < one.stop for one in ranges))
    return [ChainPlan("", tuple("0123"), ranges, offloaded=starts)]


def results(make: Callable[[], nn.Module], plans: list[ChainPlan]) -> list[torch.Tensor]:
    """Return accumulated gradients, buffers and the state of the random numbers on a simulated device."""
    with VirtualDevice("1GiB", cuda_like=True):
        model = same_seed(make)
        given = torch.randn(16, 64, 128)
        for _ in range(2):
            with AppliedPlan(model, plans):
                for _ in range(2):
                    model(given).square().mean().backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        return [*grads, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("model", MODELS)
def test_results_are_bit_for_bit_those_of_the_plain_step(model, kind):
    plain = results(MODELS[model], [])
    found = results(MODELS[model], plan_of(RANGES[kind]))
    assert len(found) == len(plain) > 4
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


# --- the choice


class Deep(nn.Module):
    """Blocks that are called in a loop, and a loss."""

    def __init__(self, n: int = 8, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def planned(**options):
    with torch.device("meta"):
        return plan_checkpoints(Deep(8, 1024), torch.randn(8, 256, 1024), **options)


def test_offload_saves_recomputation_within_a_budget():
    plain = planned(memory_budget=0.4)
    found = planned(memory_budget=0.4, offload="auto", host_memory="64GiB")
    assert plain.extra_operations > 0.05
    assert found.extra_operations < 0.5 * plain.extra_operations
    assert found.planned.peak_bytes <= found.plain.static_bytes + 0.4 * found.plain.activation_bytes
    assert found.host_bytes > 0
    assert found.relative_time < 1 + plain.extra_operations
    assert any(chain.offloaded for chain in found.chains)


def test_the_host_needs_room_for_it():
    assert planned(offload=True, host_memory="64GiB").host_bytes > 8 * MIB
    assert planned(offload=True, host_memory="1MiB").host_bytes == 0


# --- a Trainer, and PyTorch's CUDA code


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Deep()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(48, 64, 256), batch_size=16)


def test_a_trainer_gets_the_same_weights_with_less_memory(tmp_path):
    found = []
    for callbacks in ([], [GradientCheckpointing(offload=True, host_memory="64GiB")]):
        with VirtualDevice("1GiB") as device:
            module = same_seed(Module)
            trainer(tmp_path, *callbacks, logger=False, max_epochs=2).fit(module)
            found.append((module.state_dict(), device.stats().peak_allocated))
    plan = callbacks[0].plan
    (plain, before), (with_it, after) = found
    assert all(torch.equal(plain[name], with_it[name]) for name in plain)
    assert after < 0.7 * before
    assert after == pytest.approx(plan.peak_bytes, rel=0.01)


@pytest.mark.cuda_memory
@pytest.mark.parametrize("options", [{"offload": True}, {"offload": True, "memory_budget": 0.35}])
def test_its_peak_is_the_measured_one(options):
    model, given = Deep(8, 1024).cuda(), torch.randn(8, 256, 1024, device="cuda")

    def forward(m, a):
        return m(*a).square().mean()

    step = TracedStep(model, (given,), forward, device="cuda")
    plan = StepPlanner(step).plan(CheckpointOptions.parse(**options, host_memory="64GiB"))
    assert plan.host_bytes > 0
    with AppliedPlan(model, plan.chains):
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = forward(model, (given,))
            model.zero_grad()
            loss.backward()
        assert torch.cuda.max_memory_allocated() == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes
