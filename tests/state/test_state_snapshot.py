from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.state.state_snapshot import StateSnapshot


@dataclass(slots=True)
class Progress:
    ready: int = 3


class Owner:
    def __init__(self):
        self.list, self.set, self.deque = [1, [2]], {1}, deque([1, 2], maxlen=2)
        self.ordered, self.counts = OrderedDict(a=1, b=2), defaultdict(int, x=1)
        self.progress, self.array = Progress(), np.arange(3.0)
        self.own_random = random.Random(3)  # noqa: S311, no secret
        self.generator = torch.Generator().manual_seed(5)
        self.numpy_random, self.tuple, self.dtype = np.random.default_rng(1), ([1], 2), np.dtype("f4")
        self.circle = self


def test_containers_and_attributes_are_restored_in_place():
    owner = Owner()
    contents = {name: copy.deepcopy(getattr(owner, name))
                for name in ("list", "set", "deque", "ordered", "counts", "progress", "tuple")}  # fmt: skip
    draws = (owner.own_random.random(), torch.rand(2, generator=owner.generator), owner.numpy_random.random())
    owner = Owner()
    kept = dict(vars(owner))
    snapshot = StateSnapshot([owner])
    for _ in range(2):
        owner.list.append(3)
        owner.list[1].clear()
        owner.set.add(9)
        owner.deque.append(7)
        owner.ordered.move_to_end("a")
        owner.counts["new"] += 1
        owner.progress.ready = 99
        owner.array += 1
        owner.tuple[0].append(5)
        owner.new = 1
        del owner.circle
        owner.own_random.random(), torch.rand(4, generator=owner.generator), owner.numpy_random.random()
        snapshot.restore()
        assert vars(owner).keys() == kept.keys()
        assert all(vars(owner)[name] is value for name, value in kept.items())
        for name, value in contents.items():
            assert getattr(owner, name) == value, name
        assert list(owner.ordered) == ["a", "b"]
        assert owner.array.tolist() == [0, 1, 2]
        again = (owner.own_random.random(), torch.rand(2, generator=owner.generator), owner.numpy_random.random())
        assert again[0] == draws[0]
        assert torch.equal(again[1], draws[1])
        assert again[2] == draws[2]


def test_a_model_and_its_optimizer_are_restored_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()

    step()
    before = (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    snapshot = StateSnapshot([model, optimizer])
    step()
    after = copy.deepcopy(model.state_dict())
    model[0].weight.requires_grad_(requires_grad=False)
    model.add_module("extra", nn.Linear(1, 1))
    model.eval()
    optimizer.param_groups[0]["lr"] = 7.0
    snapshot.restore()
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [id(p) for p in model.parameters()] == identities
    assert model.training
    assert model[0].weight.requires_grad
    state = optimizer.state_dict()
    assert state["param_groups"] == before[1]["param_groups"]
    for index, values in before[1]["state"].items():
        for name, value in values.items():
            assert torch.equal(value, state["state"][index][name])
    step()  # the same random numbers give the same step
    assert all(torch.equal(a, b) for a, b in zip(after.values(), model.state_dict().values(), strict=False))


def test_expanded_tensors_are_restored():
    """A mask is often one row for all samples."""
    row = torch.arange(3.0)
    expanded = row.expand(4, 3)
    snapshot = StateSnapshot([{"mask": expanded}])
    row += 1
    snapshot.restore()
    assert row.tolist() == [0, 1, 2]
    assert expanded.stride() == (0, 1)


def test_a_snapshot_allocates_nothing_on_the_device():
    with VirtualDevice("64MiB") as device:
        model = nn.Linear(1024, 1024)
        before = device.stats()
        snapshot = StateSnapshot([model], skip=(VirtualDevice,), host=device.host)
        assert device.stats().allocated == before.allocated
        with torch.no_grad():
            model.weight.zero_()
        snapshot.restore()
        assert device.stats().allocated == before.allocated
        assert model.weight.abs().sum() > 0


def test_skipped_types_are_left_alone():
    owner = Owner()
    owner.other = Owner()
    owner.other.__class__ = type("Skipped", (Owner,), {})
    snapshot = StateSnapshot([owner], skip=(type(owner.other),))
    owner.other.list.append(3)
    snapshot.restore()
    assert owner.other.list == [1, [2], 3]


def test_a_large_tensor_of_a_dataset_is_not_copied():
    data = torch.utils.data.TensorDataset(torch.zeros(1000))
    snapshot = StateSnapshot([[data]])
    data.tensors[0][0] = 5  # reading would not do this
    snapshot.restore()
    assert data.tensors[0][0] == 5
