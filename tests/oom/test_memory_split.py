"""Walking over model, optimizers and batch finds what a simulated device knows by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.oom.failure_facts import MemoryAtBatchStart, split_memory

MIB = 2**20
KNOWN = {
    "parameters": "parameter",
    "gradients": "gradient",
    "optimizer": "optimizer",
    "activations": "activation",
    "inputs": "input",
}


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
        allocated = self.device.stats().allocated or 0
        split = split_memory(
            allocated, self.model, [self.optimizer], self.device.holds, batch=self.batch, before=self.before
        )
        known = self.device.composition().by_category
        assert sum(split.values()) == allocated
        assert split["buffers"] == known["buffer"]
        for name, its_name in KNOWN.items():
            assert split[name] == pytest.approx(known[its_name], abs=0.01 * allocated), name
        assert split["other"] == pytest.approx(sum(tensor.nbytes for tensor in self.leak), abs=0.01 * allocated)
        self.compared += 1

    def step(self) -> None:
        self.batch = torch.randn(2048, 256)
        self.device.count_batch(self.batch)
        self.before = MemoryAtBatchStart(
            self.device.stats().allocated or 0,
            self.batch.nbytes,
            had_gradients=any(p.grad is not None for p in self.model.parameters()),
            had_state=bool(self.optimizer.state),
        )
        loss = self.model(self.batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_the_split_agrees_with_that_of_the_virtual_device():
    with VirtualDevice() as device:
        watched = Watched(device)
        for _ in range(3):
            watched.step()
            watched.leak.append(torch.empty(MIB // 2))
    # Four module calls, six parameters, one update.
    assert watched.compared == 3 * 11


def test_without_a_start_of_the_batch_the_rest_counts_as_activations():
    with VirtualDevice() as device:
        model, rest = nn.Linear(8, 8), torch.empty(MIB)
        split = split_memory(device.stats().allocated or 0, model, [], device.holds)
        assert split["activations"] == rest.nbytes
        assert split["other"] == split["buffers"] == 0
