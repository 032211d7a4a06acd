"""Training with recomputation ends in the same bits as training without."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.exact_recomputation import is_special
from lightning_memtools.checkpointing.memory_model import runs_again
from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.models import SMALL, ZOO, harshest, same_seed

MODES = ("skip", "recompute", "avoid")


def train(model: nn.Module, shape: tuple[int, ...], steps: int = 3) -> dict[str, torch.Tensor]:
    """Returns the result of training: weights, buffers, the last gradients, and the state of the random generator."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(steps):
        out = model(torch.randn(shape))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    gradients = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {**model.state_dict(), **gradients, "rng": torch.get_rng_state()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.nan_to_num(), other[name].nan_to_num()), name


@pytest.fixture(scope="module")
def plainly():
    """Trains each model without recomputation, once."""
    done: dict[str, dict[str, torch.Tensor]] = {}

    def run(name: str) -> dict[str, torch.Tensor]:
        make, shape = (SMALL | ZOO)[name]
        if name not in done:
            done[name] = train(same_seed(make), shape)
        return done[name]

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SMALL | ZOO)
def test_gradients_weights_buffers_and_random_numbers_after_three_steps(name, mode, plainly):
    make, shape = (SMALL | ZOO)[name]
    plain = plainly(name)
    model = same_seed(make)
    plans = harshest(model, torch.empty(shape), bn_dropout=mode)
    assert any(plan.ranges for plan in plans) or mode == "avoid"
    with AppliedPlan(model, plans):
        assert_same_bits(plain, train(model, shape))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["mlp", "conv_bn_relu", "nested", "shared", "mobilenet_v2"])
def test_batchnorm_and_dropout_layers_run_once_a_step_when_skipped(name):
    make, shape = (SMALL | ZOO)[name]
    runs: dict[str, Counter[str]] = {}
    for mode in ("plain", "skip"):
        model = same_seed(make)
        plans = [] if mode == "plain" else harshest(model, torch.empty(shape), bn_dropout="skip")
        counted = runs[mode] = Counter()
        # Those that are layers of a chain, and not parts of a block that is one.
        layers = {
            path for plan in (plans or harshest(model, torch.empty(shape), bn_dropout="skip")) for path in plan.layers
        }
        for path, module in model.named_modules():
            if is_special(module) and path in layers:
                module.register_forward_hook(lambda *_, path=path, counted=counted: counted.update([path]))
        with AppliedPlan(model, plans):
            model(torch.randn(shape)).sum().backward()
        assert mode == "plain" or any(list(runs_again(plan.ranges)) for plan in plans)
    assert runs["plain"] == runs["skip"]
    assert sum(runs["plain"].values()) > 0


def test_infinite_activations_leave_the_statistics_as_they_would_be():
    def run(*, recompute: bool) -> dict[str, torch.Tensor]:
        model = same_seed(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        with AppliedPlan(model, harshest(model, torch.empty(3, 4), bn_dropout="recompute") if recompute else []):
            model(torch.full((3, 4), torch.inf)).sum().backward()
        return dict(model.state_dict())

    assert_same_bits(run(recompute=False), run(recompute=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["encoder", "conv_bn_relu", "shared"])
def test_under_autocast_gradients_and_weights_are_bitwise_equal(name, dtype):
    make, shape = SMALL[name]
    ends = []
    for recompute in (False, True):
        model = same_seed(make)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        plans = harshest(model, torch.empty(shape), bn_dropout="recompute") if recompute else []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with AppliedPlan(model, plans):
            torch.manual_seed(1)
            for _ in range(3):
                optimizer.zero_grad()
                for _ in range(2):  # accumulated
                    with torch.autocast("cpu", dtype=dtype):
                        loss = model(torch.randn(shape)).float().square().mean() / 2
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        ends.append(dict(model.state_dict()))
    assert_same_bits(*ends)


def test_a_model_called_twice_a_step_with_frozen_layers_and_an_input_without_gradient():
    ends = []
    for recompute in (False, True):
        model = same_seed(SMALL["shared"][0])
        nested = same_seed(SMALL["nested"][0])
        for one in (*nested[0].parameters(), *model[1].parameters()):
            one.requires_grad = False
        optimizer = torch.optim.SGD(
            [one for one in (*model.parameters(), *nested.parameters()) if one.requires_grad], 0.01
        )
        plans = [
            harshest(one, torch.empty(6, 32), bn_dropout="recompute") if recompute else [] for one in (model, nested)
        ]
        with AppliedPlan(model, plans[0]), AppliedPlan(nested, plans[1]):
            torch.manual_seed(1)
            for _ in range(3):
                x = torch.randn(6, 32)
                loss = nested(model(x)).square().mean() + nested(model(x + 1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        ends.append({**model.state_dict(), **{f"nested.{k}": v for k, v in nested.state_dict().items()}})
    assert_same_bits(*ends)


class Pair(nn.Module):
    """Takes and gives two tensors, as a layer of a Sequential that passes tuples on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair):
        return self.one(pair[0]).relu(), self.two(pair[1] + pair[0]).tanh()


def test_layers_may_pass_tuples_to_each_other():
    ends = []
    for recompute in (False, True):
        model = same_seed(lambda: nn.Sequential(*[Pair() for _ in range(4)]))
        x = (torch.ones(3, 8), torch.ones(3, 8, requires_grad=True))
        plans = harshest(model, x, bn_dropout="skip") if recompute else []
        assert not recompute or plans[0].ranges
        with AppliedPlan(model, plans):
            first, second = model(x)
            (first * second).sum().backward()
        ends.append({name: one.grad for name, one in model.named_parameters()} | {"x": x[1].grad})
    assert_same_bits(*ends)


class UNet(nn.Module):
    """Three levels down and up again: what each level gives is taken twice, by the next one and across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._level(a, b) for a, b in ((3, 16), (16, 32), (32, 64))])
        self.up = nn.ModuleList([self._level(32 + 64, 32), self._level(16 + 32, 16)])
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        levels = [x := level(x if at == 0 else nn.functional.max_pool2d(x, 2)) for at, level in enumerate(self.down)]
        for level, across in zip(self.up, levels[1::-1], strict=True):
            x = level(torch.cat([across, nn.functional.interpolate(x, scale_factor=2.0)], dim=1))
        return self.head(x)

    @staticmethod
    def _level(before: int, after: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)


class HandsOnViews(nn.Module):
    """Blocks whose outputs share a storage, which the code between them writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        )
        for block in self.blocks:
            block.register_forward_hook(lambda _module, _inputs, out: (out[..., :32], out))

    def forward(self, x):
        for block in self.blocks:
            half, both = block(x)
            half.mul_(0.5)
            x = x + torch.relu_(half) + both[..., 32:]
        return x


class CalledByName(nn.Module):
    """Blocks that are called by name: with a mask in a dictionary, positions, and a cache that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Named() for _ in range(4)])

    def forward(self, x):
        where = {"mask": (x > 0).float(), "positions": torch.arange(x.shape[-1]) / x.shape[-1]}
        for block in self.blocks:
            x = block(hidden=x, where=where, cache=None)
        return x


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, *, hidden, where, cache):
        assert cache is None
        inner = nn.functional.dropout(torch.tanh(self.grow(hidden + where["positions"])), 0.1)
        return hidden + self.shrink(inner) * where["mask"]


class SharesAList(nn.Module):
    """Blocks that replace an element of the list that they are given, as HRNet's do; the code around them reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Replaces() for _ in range(4)])

    def forward(self, x):
        pair = [x, x]
        for block in self.blocks:
            pair[1] = block(pair)
        return pair[0] + pair[1]


class _Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, pair):
        pair[0] = self.shrink(torch.tanh(self.grow(pair[0])))
        return pair[0] * pair[1]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(SharesAList, (64, 32)), (UNet, (4, 3, 32, 32)), (HandsOnViews, (64, 32)), (CalledByName, (64, 32))],
)
def test_own_forwards_with_skips_shared_storages_lists_and_arguments_by_name(make, shape):
    model = same_seed(make)
    plan = plan_checkpoints(model, torch.empty(shape), bn_dropout="recompute")
    assert plan.refused is None
    assert sum(len(list(runs_again(chain.ranges))) for chain in plan.chains) >= 2
    plain = train(same_seed(make), shape)
    with plan.apply(model) as applied:
        assert_same_bits(plain, train(model, shape))
    assert applied.differing == {}
