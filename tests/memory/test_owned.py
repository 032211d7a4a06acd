from __future__ import annotations

import torch
from torch import nn

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.owned import on_device_of, owned_by


def everything(tensor: torch.Tensor) -> bool:
    return True


def rounded(*numels: int) -> int:
    """float32 tensors in blocks of 512 bytes."""
    return sum(-(-4 * n // 512) * 512 for n in numels)


def test_every_category_by_arithmetic():
    model = nn.Sequential(nn.Linear(10, 100), nn.BatchNorm1d(100))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(20, 10)
    model(x).sum().backward()
    optimizer.step()
    sizes = (1000, 100, 100, 100)
    owned = owned_by(model, [optimizer], everything, inputs={"x": [x], "n": 3})
    assert owned.by_category == {
        "parameters": rounded(*sizes),
        "buffers": rounded(100, 100) + 512,  # num_batches_tracked is a scalar
        "gradients": rounded(*sizes),
        "optimizer": 2 * rounded(*sizes) + 4 * 512,  # two moments, and a scalar step count for each parameter
        "inputs": rounded(200),
    }
    assert owned.total_bytes == sum(owned.by_category.values())


def test_shared_weights_and_views_count_once_and_in_their_first_category():
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    model[1].weight = model[0].weight
    owned = owned_by(model, [], everything, inputs=[model[0].weight.detach()[0], torch.empty(64)[:2]])
    assert owned.by_category["parameters"] == rounded(64)
    assert owned.by_category["inputs"] == rounded(64)


def test_tensors_of_a_virtual_device_are_distinguished_from_those_of_the_host():
    made_before = torch.zeros(5)
    with VirtualDevice() as device:
        on_device = on_device_of(device, torch.device("cpu"))
        with device.host():
            host = torch.zeros(5)
        there = torch.zeros(5)
        assert [on_device(t) for t in (made_before, host, there, there[1:3])] == [False, False, True, True]
        device.track(made_before)
        assert on_device(made_before)
