"""`estimate_memory(engine="cuda")`: the steps on PyTorch's own CUDA code, read as the simulation is."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memtools import estimate_memory

pytestmark = pytest.mark.cuda_memory


class Network(nn.Module):
    """Convolutions, a normalization, a recurrent layer and tied weights, which autocast casts once and we twice."""

    def __init__(self, *, tied=True):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3))
        self.recurrent = nn.GRU(64, 64, batch_first=True)
        self.tied, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        if tied:
            self.head.weight = self.tied.weight

    def forward(self, x):
        out, _ = self.recurrent(self.convolutions(x).flatten(2).transpose(1, 2))
        return self.head(self.tied(out))


def step(model, batch):
    return F.cross_entropy(model(batch["x"])[:, -1], batch["y"])


def batch(n=8):
    return {"x": torch.zeros(n, 3, 48, 48), "y": torch.zeros(n, dtype=torch.long)}


def both(model, **options):
    return tuple(estimate_memory(model, batch(), step=step, engine=one, **options) for one in ("cuda", "simulation"))


def categories(estimate):
    """The composition; the history of CUDA's allocator does not tell workspaces of kernels from other temporaries."""
    found = dict(estimate.composition)
    found["temporaries"] += found.pop("workspace")
    return found


SETTINGS = [
    {"optimizer": torch.optim.AdamW},
    {"optimizer": torch.optim.Adam, "precision": "bf16-mixed", "accumulate": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_both_engines_give_the_same_bytes_categories_and_modules(settings):
    real, simulated = both(Network(tied="precision" not in settings), **settings)
    assert (real.engine, simulated.engine) == ("cuda", "simulation")
    assert (real.peak_allocated, real.peak_reserved) == (simulated.peak_allocated, simulated.peak_reserved)
    # A few scalars are told apart otherwise.
    assert categories(real) == pytest.approx(categories(simulated), abs=2048)
    assert real.step_peaks == simulated.step_peaks
    assert (real.parameter_count, real.gradient_count) == (simulated.parameter_count, simulated.gradient_count)
    assert real.parameter_bytes == simulated.parameter_bytes
    assert [asdict(one) for one in real.modules] == [asdict(one) for one in simulated.modules]


def test_the_users_objects_stay_as_they_were():
    model, given = Network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, given).backward()
    optimizer.step()
    before = {
        name: (one, one.data_ptr(), one.detach().clone()) for name, one in model.state_dict(keep_vars=True).items()
    }
    gradients = {name: one.grad for name, one in model.named_parameters()}
    state = {name: one.clone() for name, one in optimizer.state[model.tied.weight].items()}
    random, allocated = (torch.get_rng_state(), torch.cuda.get_rng_state()), torch.cuda.memory_allocated()
    real = estimate_memory(model, given, step=step, optimizer=optimizer, engine="cuda")
    simulated = estimate_memory(model, given, step=step, optimizer=optimizer)
    # A few scalars are told apart otherwise.
    assert categories(real) == pytest.approx(categories(simulated), abs=2048)
    assert real.step_peaks == simulated.step_peaks
    assert real.composition["optimizer"] == pytest.approx(real.composition["parameters"], rel=0.01)
    for name, one in model.state_dict(keep_vars=True).items():
        was, address, values = before[name]
        assert one is was, name
        assert (one.device.type, one.data_ptr()) == ("cpu", address)
        assert torch.equal(one, values)
    assert all(one.grad is gradients[name] for name, one in model.named_parameters())
    assert all(torch.equal(one, state[name]) for name, one in optimizer.state[model.tied.weight].items())
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), random[0])
    assert torch.equal(torch.cuda.get_rng_state(), random[1])
    assert torch.cuda.memory_allocated() <= allocated
