"""Training with recomputation ends in the same bits as training without."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.exact_recomputation import is_special
from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.models import SMALL, harshest, same_seed
from tests.lightning_models import assert_same_bits

MODES = [("skip", False), ("recompute", False), ("recompute", True)]


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
    ends = {**model.state_dict(), **gradients, "rng": torch.get_rng_state()}
    return {name: one.nan_to_num() for name, one in ends.items()}  # NaN is equal to NaN


@pytest.fixture(scope="module")
def plainly():
    """Trains each model without recomputation, once."""
    done: dict[str, dict[str, torch.Tensor]] = {}

    def run(name: str) -> dict[str, torch.Tensor]:
        make, shape = SMALL[name]
        if name not in done:
            done[name] = train(same_seed(make), shape)
        return done[name]

    return run


@pytest.mark.parametrize(("mode", "prove"), MODES)
@pytest.mark.parametrize("name", SMALL)
def test_gradients_weights_buffers_and_random_numbers_after_three_steps(name, mode, prove, plainly):
    make, shape = SMALL[name]
    plain = plainly(name)
    model = same_seed(make)
    plans = harshest(model, bn_dropout=mode)
    assert any(plan.ranges for plan in plans)
    with AppliedPlan(model, plans, prove=prove):
        assert_same_bits(plain, train(model, shape))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["mlp", "conv_bn_relu", "nested", "shared"])
def test_batchnorm_and_dropout_layers_run_once_a_step_when_skipped(name):
    make, shape = SMALL[name]
    runs: dict[str, Counter[str]] = {}
    for mode in ("plain", "skip"):
        model = same_seed(make)
        plans = [] if mode == "plain" else harshest(model, bn_dropout="skip")
        counted = runs[mode] = Counter()
        # Those that are layers of a chain, and not parts of a block that is one.
        layers = {path for plan in (plans or harshest(model, bn_dropout="skip")) for path in plan.layers}
        for path, module in model.named_modules():
            if is_special(module) and path in layers:
                module.register_forward_hook(lambda *_, path=path, counted=counted: counted.update([path]))
        with AppliedPlan(model, plans):
            model(torch.randn(shape)).sum().backward()
        assert mode == "plain" or any(plan.ranges for plan in plans)
    assert runs["plain"] == runs["skip"]
    assert sum(runs["plain"].values()) > 0


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
    ("make", "shape", "share"),
    [(SharesAList, (64, 32), 0.81), (UNet, (4, 3, 32, 32), 0.69), (HandsOnViews, (64, 32), 0.71)],
)
def test_own_forwards_with_skips_shared_storages_and_lists(make, shape, share):
    model = same_seed(make)
    plan = plan_checkpoints(model, torch.empty(shape), bn_dropout="recompute")
    assert plan.refused is None
    assert plan.peak_bytes <= share * plan.plain_peak_bytes
    assert sum(one.stop - one.start for chain in plan.chains for one in chain.ranges) >= 2
    plain = train(same_seed(make), shape)
    with plan.apply(model):
        assert_same_bits(plain, train(model, shape))


def gradients_twice(model, x):
    out = model(x).square().mean()
    first = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(out, [x, *model.parameters()])
    return [*first, *second]


def penalized(model, x):
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.norm()).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize("how", [gradients_twice, penalized])
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
