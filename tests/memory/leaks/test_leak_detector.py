from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.leaks.holders import names_of_modules
from lightning_memtools.memory.leaks.leak_detector import LeakDetector
from lightning_memtools.memory.owned import owned_by


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []


@pytest.fixture
def device():
    with gc_frozen(), VirtualDevice("1GiB") as device:
        yield device


def new(n: int = 128) -> torch.Tensor:
    return torch.zeros(n)  # float32: 512 bytes each for n = 128


def epochs(device, model, *steps, warn_after=3):
    """Let the detector read after each step, and once before; return its reports, each with the number of its step."""
    detector = LeakDetector(device.holds, warn_after=warn_after, find_names=lambda: names_of_modules(model))
    reports = []
    for i, step in enumerate([lambda: None, *steps]):
        step()
        owned = owned_by(model, [], device.holds)
        report = detector.read(device.stats().allocated - owned.total_bytes, owned)
        if report is not None:
            reports.append((i, report))
    return reports


def test_a_tensor_that_is_replaced_by_a_larger_one_every_time_is_reported_after_twice_as_many(device):
    model = Model()

    def concatenate():
        model.kept[:] = [torch.cat([*model.kept, new()])]

    ((after, report),) = epochs(device, model, *[concatenate] * 8)
    assert after == 6
    (finding,) = report.findings
    assert finding.holder.path == "Model.kept[0]"
    assert finding.tensors == {((768,), "float32"): 1}


def pauses(model, device, at):
    if at not in {2, 5, 8}:
        model.kept.append(new())


def fills_a_cache(model, device, at):
    model.kept += [new() for _ in range(max(0, min(10, 20 - len(model.kept))))]


def replaces(model, device, at):  # and happens to grow
    model.kept[:] = [new(128 * (1, 2, 3, 4, 5, 4, 9, 10, 11)[at])]


def grows_on_the_host(model, device, at):
    with device.host():
        model.kept.append(new())


def grows_layers(model, device, at):  # what the model owns
    model.add_module(f"layer{at}", nn.Linear(64, 64))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("step", [pauses, fills_a_cache, replaces, grows_on_the_host, grows_layers])
def test_what_is_no_leak_is_not_reported(device, step):
    model = Model()
    assert not epochs(device, model, *[lambda at=at: step(model, device, at) for at in range(9)])
    assert step is not fills_a_cache or len(model.kept) == 20


def test_the_detector_keeps_nothing_alive(device):
    model = Model()
    detector = LeakDetector(device.holds, warn_after=3)
    for _ in range(3):
        owned = owned_by(model, [], device.holds)
        assert detector.read(device.stats().allocated - owned.total_bytes, owned) is None
        model.kept.append(new())
    watched = [weakref.ref(tensor) for tensor in model.kept]
    model.kept.clear()
    assert [reference() for reference in watched] == [None, None, None]


class Hoarder(Model):
    """Keeps one tensor in each epoch, in ways in which the tensor itself is in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(8))

    def closures(self):
        kept = new()
        self.kept.append(lambda: 2 * kept)

    def generators(self):
        def numbers():
            kept = new()
            yield 1
            yield kept

        began = numbers()
        next(began)
        self.kept.append(began)


@pytest.mark.parametrize("way", ["closures", "generators"])
def test_what_holds_the_holders_is_named(device, way):
    model = Hoarder()
    ((after, report),) = epochs(device, model, *[getattr(model, way)] * 4)
    assert after == 3
    (finding,) = report.findings
    assert finding.holder.container_path == "Hoarder.kept"
    assert finding.tensors == {((128,), "float32"): 3}
