"""Tests of plan_checkpoints: what it finds, chooses, predicts and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan
from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.memory.virtual import VirtualDevice
from tests.checkpointing.models import ZOO, conv_bn_relu, encoder, mlp, nested, same_seed


def real_peak(model: nn.Module, plans: tuple[ChainPlan, ...], *args: torch.Tensor) -> int:
    """The simulated allocator's peak over two real steps, as Lightning orders them."""
    args = tuple(one.clone() for one in args)
    with VirtualDevice() as device, AppliedPlan(model, plans):
        device.track(model, *args)
        for _ in range(2):
            loss = model(*args).sum()
            model.zero_grad()
            loss.backward()
        peak = device.stats().peak_allocated
    model.zero_grad()
    assert peak is not None
    return peak


SAMPLES = {
    "encoder": (lambda: encoder(6), (16, 24, 32)),
    "conv_bn_relu": (lambda: conv_bn_relu(16, 8), (4, 3, 32, 32)),
    "mlp": (lambda: mlp(128), (512, 128)),
    "nested": (nested, (2048, 32)),
    "resnet18": (ZOO["resnet18"][0], (2, 3, 64, 64)),
    "mobilenet_v2": (ZOO["mobilenet_v2"][0], (2, 3, 64, 64)),
    "efficientnet_b0": (ZOO["efficientnet_b0"][0], (2, 3, 64, 64)),
    "timm_vit_tiny": (ZOO["timm_vit_tiny"][0], (8, 3, 32, 32)),
}


@pytest.mark.parametrize("options", [{}, {"segments": 3}, {"memory_budget": 0.6}], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_the_predicted_peak_is_that_of_the_applied_plan(name, options):
    make, shape = SAMPLES[name]
    model, x = same_seed(make), torch.randn(shape)
    try:
        plan = plan_checkpoints(model, x, bn_dropout="recompute", **options)
    except ValueError as error:
        assert "smallest reachable peak" in str(error)  # noqa: PT017, where 0.6 cannot be reached it says so
        return
    assert plan.peak_bytes == pytest.approx(real_peak(model, plan.chains, x), rel=0.02)
    assert plan.plain_peak_bytes == pytest.approx(real_peak(model, (), x), rel=0.02)
    if plan.refused is None:
        assert plan.peak_bytes < plan.plain_peak_bytes


def test_planning_touches_neither_the_model_nor_random_numbers():
    model = same_seed(lambda: conv_bn_relu(16, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan_checkpoints(model, torch.empty(4, 3, 32, 32), bn_dropout="recompute")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all("forward" not in vars(one) for one in model.modules())


def test_skip_is_refused_where_only_recompute_saves_memory_and_the_refusal_says_so():
    sample = torch.empty(4, 3, 32, 32)
    model = conv_bn_relu(16, 8)
    skip, recompute = (plan_checkpoints(model, sample, bn_dropout=mode) for mode in ("skip", "recompute"))
    assert skip.refused is not None
    assert 'With bn_dropout="recompute", BatchNorm and Dropout layers may run twice' in skip.refused
    assert skip.chains == ()
    assert recompute.refused is None
    assert recompute.peak_bytes < 0.6 * recompute.plain_peak_bytes
    assert recompute.extra_operations <= 0.33
    assert skip.left_out["1"] == "BatchNorm2d never runs twice"


@pytest.mark.parametrize(("segments", "ranges"), [(1, []), (3, [(0, 3), (3, 6)]), (4, [(0, 2), (2, 4), (4, 6)])])
def test_chunks_are_those_of_checkpoint_sequential(segments, ranges):
    plan = plan_checkpoints(encoder(10), torch.empty(16, 24, 32), segments=segments)
    assert [one for chain in plan.chains for one in chain.ranges] == ranges


def test_the_budget_is_kept_with_less_recomputation_the_larger_it_is():
    model, x = encoder(8, 0.0), torch.empty(16, 24, 32)
    plain = plan_checkpoints(model, x, memory_budget=1.0)
    assert plain.extra_operations == 0
    assert "within the budget" in (plain.refused or "")
    extras = []
    for share in (0.9, 0.6, 0.4):
        plan = plan_checkpoints(model, x, memory_budget=share)
        assert plan.planned.activation_bytes <= share * plan.plain.activation_bytes
        extras.append(plan.extra_operations)
    assert extras == sorted(extras)
    assert extras[0] > 0
    limit = plan_checkpoints(model, x).plain_peak_bytes // 2
    assert plan_checkpoints(model, x, memory_budget=f"{limit}B").peak_bytes <= limit


def test_where_nothing_can_be_taken_the_plan_says_so():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    plan = plan_checkpoints(Bare(), torch.empty(2, 4))
    assert plan.chains == ()
    assert "No plan lowers the predicted peak" in plan.sentence()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, "segments=0 is not a number of chunks: give an int of at least 1"),
        ({"segments": True}, "segments=True"),
        ({"segments": 2.0}, "segments=2.0"),
        ({"memory_budget": 0.0}, "memory_budget=0.0 is not a share"),
        ({"memory_budget": 1.5}, "memory_budget=1.5 is not a share"),
        ({"memory_budget": 1}, "a bare int never means either"),
        ({"memory_budget": "8"}, "Not a size: '8'"),
        ({"memory_budget": "0GiB"}, "leaves no memory at all"),
        ({"bn_dropout": "avoid"}, "bn_dropout='avoid' is neither"),
        ({"include": "blocks.*"}, r"give a list of patterns, as include=\['blocks"),
        ({"include": ["nothing.*"]}, r"pattern 'nothing\.\*' matches no module of Sequential. Examples of its names: "),
        ({"exclude": ["9"]}, "exclude: the pattern '9' matches no module"),
        ({"segments": 2, "memory_budget": 0.5}, "contradict each other"),
    ],
)
def test_errors_of_options_name_the_value_and_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        plan_checkpoints(nested(), torch.empty(6, 32), **options)
