"""What layers keep goes to host memory and comes back: the same numbers, less of the device, nothing left behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lightning_memtools import GradientCheckpointing, VirtualDevice, plan_checkpoints
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.host_offload import HostOffload
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range, Unit
from lightning_memtools.checkpointing.offload_choice import (
    DeviceRates,
    OffloadedLayer,
    free_host_bytes,
    waiting_seconds,
)
from lightning_memtools.checkpointing.planning import BudgetTooSmallError, StepPlanner
from lightning_memtools.simulation.step_trace import TracedStep
from tests.checkpointing.models import same_seed
from tests.lightning_models import trainer

MIB = 1 << 20
FAST = DeviceRates(1e12, 1e10, is_measured=False)


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


class Skips(nn.Module):
    """A U-Net of linear layers: what the first layers return, the last are given too."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(3))
        self.up = nn.ModuleList(Pair(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x, kept.pop())
        return x


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([x, other], -1)))


def blocks(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[kind() for _ in range(4)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: blocks(Attention),
    "in place": lambda: blocks(InPlace),
    "skips": lambda: blocks(Skips),
}
RANGES = {"kept": (), "recomputed": tuple(Range(at, at + 1) for at in range(4)), "both": (Range(1, 3),)}


def plan_of(ranges: tuple[Range, ...], offloaded: tuple[int, ...] = (0, 1, 2, 3)) -> list[ChainPlan]:
    starts = tuple(at for at in offloaded if not any(one.start < at < one.stop for one in ranges))
    return [ChainPlan("", tuple("0123"), ranges, offloaded=starts)]


def loss_of(model: nn.Module, given: torch.Tensor, passes: int = 1) -> None:
    for _ in range(passes):
        model(given).square().mean().backward()


def twice_back(model: nn.Module, given: torch.Tensor) -> None:
    given = given.clone().requires_grad_()
    loss = model(given).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model: nn.Module, given: torch.Tensor) -> None:
    given = given.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given).sin().sum(), given, create_graph=True)
    slope.square().mean().backward()


def none_in_the_middle(model: nn.Sequential, given: torch.Tensor) -> None:
    """The first half gets no gradient: nothing that was brought back for it is read."""
    model[2:](model[:2](given).detach()).square().mean().backward()


STEPS = {
    "a step": loss_of,
    "accumulation": lambda model, given: loss_of(model, given, 3),
    "backward twice": twice_back,
    "no gradient in half": none_in_the_middle,
}


def results(make: Callable[[], nn.Module], plans: list[ChainPlan], step: Callable[..., None]) -> list[torch.Tensor]:
    """Return gradients, buffers and the state of the random numbers after two steps on a simulated device."""
    with VirtualDevice("1GiB", cuda_like=True):
        model = same_seed(make)
        given = torch.randn(16, 64, 128)
        for _ in range(2):
            with AppliedPlan(model, plans):
                step(model, given)
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        return [*grads, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", STEPS)
def test_results_are_bit_for_bit_those_of_the_plain_step(step, model, kind):
    plain = results(MODELS[model], [], STEPS[step])
    found = results(MODELS[model], plan_of(RANGES[kind]), STEPS[step])
    assert len(found) == len(plain) > 4
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_gradients_of_gradients_are_the_same():
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)])

    plain = results(make, [], gradient_penalty)
    plan = [ChainPlan("", tuple(f"{at}.{part}" for at in range(4) for part in range(2)), (), offloaded=(0, 1, 2, 3, 4))]
    assert all(torch.equal(*pair) for pair in zip(results(make, plan, gradient_penalty), plain, strict=True))


def test_the_device_holds_what_two_units_keep():
    def held(offloaded: tuple[int, ...]) -> tuple[int, int]:
        with VirtualDevice("1GiB", cuda_like=True) as device:
            model, given = same_seed(lambda: blocks(Attention)), torch.randn(16, 64, 128)
            before = device.stats().allocated
            assert before is not None
            with AppliedPlan(model, plan_of((), offloaded)):
                out = model(given)
                kept = (device.stats().allocated or 0) - before
                out.square().mean().backward()
                model.zero_grad()
                del out
                gc.collect()
            return kept, (device.stats().allocated or 0) - before

    whole, after = held(())
    part, left = held((0, 1, 2, 3))
    assert left == after == 0
    # The last unit's tensors are needed first and stay. Small tensors stay, too.
    assert whole / 4 <= part <= whole / 4 + 0.1 * whole


def test_a_step_that_fails_in_the_middle_leaves_nothing():
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x.shape)

    with VirtualDevice("1GiB") as device:
        model, given = nn.Sequential(Attention(), Attention(), Fails(), Attention()), torch.randn(16, 64, 128)
        before = device.stats().allocated
        for _ in range(2):
            with AppliedPlan(model, plan_of(())), pytest.raises(ValueError, match="64"):
                model(given)
            gc.collect()
            assert device.stats().allocated == before


def test_a_backward_pass_before_the_next_unit_has_run_changes_nothing():
    """The memory of the first unit is brought back, given back when the second has run, and brought back once more."""

    def gradients(offload: HostOffload | None) -> list[torch.Tensor | None]:
        with VirtualDevice("1GiB"):
            torch.manual_seed(0)
            first, second = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
            with nullcontext() if offload is None else offload.unit([]):
                one = (first.sin() * second.exp()).square()
            one.sum().backward(retain_graph=True)
            with nullcontext() if offload is None else offload.unit([]):
                two = (second.cos() * one.detach()).square()
            (one.sum() + two.sum()).backward()
            return [first.grad, second.grad]

    found, plain = gradients(HostOffload()), gradients(None)
    assert all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, plain, strict=True)
    )


def test_tensors_on_the_host_stay_where_they_are():
    kept: list[int] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, upstream):
            (x,) = ctx.saved_tensors
            kept.append(x.data_ptr())
            return 2 * x * upstream

    given = torch.randn(512, 512, requires_grad=True)
    with HostOffload().unit([]):
        out = Square.apply(given)
    out.sum().backward()
    assert kept == [given.data_ptr()]


def test_a_sharded_models_parameters_stay_where_they_are(one_rank_group):
    found = []
    for plans in ([], plan_of(()), plan_of(RANGES["recomputed"])):
        with VirtualDevice("1GiB") as device:
            model, given = same_seed(lambda: blocks(Attention)), torch.randn(16, 64, 128)
            mesh = init_device_mesh("cpu", (1,))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with AppliedPlan(model, plans):
                model(given).square().mean().backward()
            peak = device.stats().peak_allocated
            found.append(([one.grad.to_local().clone() for one in model.parameters()], peak))
    plain, *others = found
    for grads, peak in others:
        assert all(torch.equal(*pair) for pair in zip(grads, plain[0], strict=True))
        assert peak < plain[1]


@pytest.fixture
def one_rank_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# --- the choice


def units_of(*sizes: int) -> list[Unit]:
    return [Unit(own_bytes=size, out_bytes=1, operations=10**10) for size in sizes]


def test_waits_for_copies_are_those_of_a_time_line():
    """Four layers of 10 ms forward and 20 ms backward; copies at 10 GB/s."""
    units = units_of(1, 1, 1, 1)

    def waits(n_bytes: int) -> float:
        layers = [OffloadedLayer(at, at + 1, (0, at), n_bytes, 1, may_run_again=True) for at in range(4)]
        return waiting_seconds(units, (), layers, FAST)

    assert waits(100_000_000) == pytest.approx(0, abs=1e-9)  # 10 ms: each copy ends when the next layer does
    # 15 ms: each layer but the first waits 5 ms for the copy of the one before it. 20 ms of backward hide a copy back.
    assert waits(150_000_000) == pytest.approx(0.015)
    # 25 ms: each of three layers waits 15 ms in forward, and 5 ms for its own copy back in backward.
    assert waits(250_000_000) == pytest.approx(3 * 0.015 + 3 * 0.005)


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


def test_budgets_below_all_recomputation_are_reached_by_it():
    with pytest.raises(BudgetTooSmallError) as error:
        planned(memory_budget=0.05)
    less = error.value.reachable_bytes - MIB
    found = planned(memory_budget=f"{less >> 10}KiB", offload="auto", host_memory="64GiB")
    assert found.peak_bytes <= less
    assert found.host_bytes > 0


def test_the_host_needs_room_for_it():
    assert planned(offload=True, host_memory="64GiB").host_bytes > 8 * MIB
    assert planned(offload=True, host_memory="1MiB").host_bytes == 0


def test_processes_of_one_machine_share_what_is_free():
    alone, with_others = (free_host_bytes(pl.Trainer(accelerator="cpu", devices=n, barebones=True)) for n in (1, 4))
    assert alone == pytest.approx(free_host_bytes(None), rel=0.1)
    assert alone == pytest.approx(4 * with_others, rel=0.1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offload": "yes"}, "'yes'"),
        ({"offload": True, "segments": 4}, "segments=4"),
        ({"host_memory": "much"}, "'much'"),
        ({"host_memory": 4}, "host_memory=4"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        CheckpointOptions.parse(**options)


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


@pytest.mark.gpu
def test_a_gpu_gives_the_same_gradients():
    given = torch.randn(64, 64, 128, device="cuda")
    for make in MODELS.values():
        model = same_seed(make).cuda()
        found = []
        for plans in ([], plan_of(()), plan_of(RANGES["recomputed"])):
            twin = copy.deepcopy(model)
            torch.manual_seed(0)
            for _ in range(3):
                with AppliedPlan(twin, plans):
                    loss_of(twin, given)
            found.append([one.grad for one in twin.parameters()])
        assert all(torch.equal(*pair) for grads in found[1:] for pair in zip(grads, found[0], strict=True))
