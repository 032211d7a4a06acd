"""Walking over model, optimizers and batch finds what a simulated device knows by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.failure_facts import CATEGORIES, MemoryAtBatchStart, split_by_device, split_by_walking

MIB = 2**20


class Watched:
    """A training of three steps whose every module call, backward and update compares the two splits."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.leak: list[torch.Tensor] = []
        self.batch: Any = None
        self.before: MemoryAtBatchStart | None = None
        self.compared = 0
        for module in self.model:
            module.register_forward_hook(lambda *_: self.compare())
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.compare())
        self.optimizer.register_step_post_hook(lambda *_: self.compare())

    def compare(self) -> None:
        allocated = self.device.stats().allocated
        assert allocated is not None
        walked = split_by_walking(
            allocated, self.model, [self.optimizer], self.device.holds, batch=self.batch, before=self.before
        )
        known = split_by_device(self.device, self.model)
        for split in (walked, known):
            assert sum(split.by_category.values()) == allocated
        assert walked.buffers == known.buffers
        for name in CATEGORIES:
            assert walked.by_category[name] == pytest.approx(known.by_category[name], abs=0.01 * allocated), name
        assert walked.older == pytest.approx(sum(one.nbytes for one in self.leak), abs=0.01 * allocated)
        self.compared += 1

    def step(self) -> None:
        self.batch = torch.randn(2048, 256)
        self.device.count_batch(self.batch)
        allocated = self.device.stats().allocated
        assert allocated is not None
        self.before = MemoryAtBatchStart(
            allocated,
            self.batch.nbytes,
            had_gradients=any(p.grad is not None for p in self.model.parameters()),
            had_state=bool(self.optimizer.state),
        )
        loss = self.model(self.batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_the_split_by_walking_agrees_with_that_of_the_virtual_device():
    with VirtualDevice() as device:
        watched = Watched(device)
        for _ in range(3):
            watched.step()
            watched.leak.append(torch.empty(MIB // 2))
    # Four module calls, six parameters, one update.
    assert watched.compared == 3 * 11


def test_modules_are_listed_by_name_with_the_largest_first():
    with VirtualDevice() as device:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64)))
        out = model(torch.ones(1024, 8))
        split = split_by_device(device, model)
        del out
    assert split.by_module == (("1.0", 1024 * 64 * 4), ("0", 1024 * 8 * 4))
    assert split.exact


def test_without_a_start_of_the_batch_the_rest_counts_as_activations():
    with VirtualDevice() as device:
        model = nn.Linear(8, 8)
        rest = torch.empty(MIB)
        allocated = device.stats().allocated
        assert allocated is not None
        split = split_by_walking(allocated, model, [], device.holds)
        assert split.by_category["activations"] == rest.nbytes
        assert split.by_category["other"] == split.older == 0
