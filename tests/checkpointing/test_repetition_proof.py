"""Layers that draw from other random streams are recomputed exactly; those that cannot be are found, and left alone."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memtools import plan_checkpoints
from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan, Range
from lightning_memtools.checkpointing.repetition_proof import RecomputationDiffersWarning, fingerprint
from tests.checkpointing.models import same_seed


class Scales(nn.Module):
    """Multiplies by a number that `draw` gives, from a stream that this module holds."""

    def __init__(self, draw, stream=None) -> None:
        super().__init__()
        self.draw = draw
        self.stream = stream

    def forward(self, x):
        return (x * float(self.draw(self.stream))).sin()


def drawn_by_torch(generator):
    return torch.rand((), generator=generator)


def chain(draw, make_stream):
    layers = []
    for at in range(4):
        layers += [nn.Linear(8, 8), Scales(draw, make_stream(at)), nn.Tanh()]
    return nn.Sequential(*layers)


STREAMS = {
    "random": (lambda _: random.random(), lambda _: None),  # noqa: S311
    "numpy.random": (lambda _: np.random.rand(), lambda _: None),  # noqa: NPY002
    "its own torch.Generator": (drawn_by_torch, lambda at: torch.Generator().manual_seed(at)),
    "its own random.Random": (lambda own: own.random(), random.Random),
    "its own numpy Generator": (lambda own: own.random(), np.random.default_rng),
    "its own numpy RandomState": (lambda own: own.rand(), np.random.RandomState),
    "one of a list": (lambda own: drawn_by_torch(own[0]), lambda at: [torch.Generator().manual_seed(at)]),
}


def trained(model, x, plans, *, prove, steps=3):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with AppliedPlan(model, plans, prove=prove):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        ends = [*losses, *(one.grad for one in model.parameters()), *model.state_dict().values(), torch.get_rng_state()]
        ends += [torch.tensor([random.random(), np.random.rand()])]  # noqa: S311, NPY002
    return ends


@pytest.mark.parametrize("prove", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_streams_besides_torchs_own_are_drawn_from_as_in_the_plain_run(name, prove):
    x = torch.randn(5, 8)
    ends = []
    for recompute in (False, True):
        model = same_seed(lambda: chain(*STREAMS[name]))
        whole = [ChainPlan("", tuple(map(str, range(12))), (Range(0, 11),))] if recompute else []
        ends.append(trained(model, x, whole, prove=prove))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Counting(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (x * self.calls).sin()


def test_a_layer_that_counts_its_calls_is_found_in_the_trace():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Counting(), nn.Tanh()) for _ in range(4)])
    plan = plan_checkpoints(model, torch.empty(2048, 64))
    assert plan.left_out == dict.fromkeys(("0.2", "1.2", "2.2", "3.2"), "it changes calls when it runs")
    assert plan.refused is None
    assert model[0][2].calls == 0


def hidden(kind, calls):
    """A layer of the kind whose state nobody can see, and which differs from call to call."""

    class Hidden(nn.Module):
        def forward(self, x):
            if kind == "values":
                return (x * next(calls)).sin()
            return x.sin() + 0 * (x * next(calls)).square()  # the output is the same, what it keeps is not

    return Hidden()


@pytest.mark.parametrize("kind", ["values", "kept tensors"])
def test_a_layer_that_differs_runs_as_usual_and_is_named(kind):
    torch.manual_seed(0)
    odd = hidden(kind, itertools.count(1))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), odd, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    plan = ChainPlan("", tuple("0123456"), (Range(0, 4), Range(4, 6)))
    x = torch.randn(5, 8)
    runs = []
    model[0].register_forward_hook(lambda *_: runs.append("first range"))
    model[5].register_forward_hook(lambda *_: runs.append("second range"))
    with (
        AppliedPlan(model, [plan], prove=True),
        pytest.warns(RecomputationDiffersWarning, match=r"The layer 2 did not do the same .*exclude=\['2'\]"),
    ):
        out = model(x)
    loss = out.square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    # Two runs to prove, one that is used, and only the range that repeats itself runs again.
    assert runs.count("first range") == 3
    # The forward pass that was made: its gradients by finite differences of that very function.
    step = runs.count("first range")
    same = hidden(kind, itertools.repeat(step))
    fixed = nn.Sequential(*[same if layer is odd else layer for layer in model])
    assert torch.equal(fixed(x), out)
    expected = torch.autograd.grad(fixed(x).square().mean(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_fingerprint_sees_one_element_and_the_order(dtype):
    torch.manual_seed(0)
    one = torch.randn(6, 7, 8, dtype=dtype) if dtype.is_complex else (torch.randn(6, 7, 8).relu() * 3).to(dtype)
    assert fingerprint(one) == fingerprint(one.clone())
    assert fingerprint(one) == fingerprint(one.transpose(0, 2).contiguous().transpose(0, 2))
    changed = one.clone()
    changed[3, 4, 5] = ~changed[3, 4, 5] if dtype is torch.bool else changed[3, 4, 5] + 1
    swapped = one.flip(1)
    assert fingerprint(one) != fingerprint(changed)
    assert fingerprint(one) != fingerprint(swapped)
    assert fingerprint(torch.ones_like(one)) != fingerprint(torch.zeros_like(one))
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
    for size in (1, 3, 8, 2**17 + 5):  # whole chunks of 8 bytes, and what is left of them
        rows = torch.zeros(size + 1, dtype=dtype)[1:]  # a view that begins at any byte
        other = rows.clone()
        other[-1] = 1
        assert fingerprint(rows) == fingerprint(rows.clone())
        assert fingerprint(rows) != fingerprint(other)
