"""Real and fake tensors of the same step give the same statistics and composition, to the byte."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.model_zoo import PLAIN, Make, train_step
from tests.memory.virtual.reading import allocated


def to_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter.detach()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)


def two_steps(make: Make, *, fake: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model, inputs = make()
    mode = FakeTensorMode() if fake else None
    if mode is not None:
        to_fake(model, mode)
        inputs = tuple(mode.from_tensor(tensor) for tensor in inputs)
    with mode or contextlib.nullcontext(), VirtualDevice("2GiB", **options) as device:
        device.track(model, inputs)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            loss = train_step(model, inputs, optimizer)
        found = device.stats(), device.composition_at_peak(), device.composition()
        del loss
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_real_and_fake_agree_to_the_byte(name: str) -> None:
    real, fake = two_steps(PLAIN[name], fake=False), two_steps(PLAIN[name], fake=True)
    assert real == fake
    assert real[0].peak_allocated > 0


def test_real_and_fake_agree_with_cuda_like_substitutions() -> None:
    make = PLAIN["encoder"]
    real = two_steps(make, fake=False, cuda_like=True)
    assert real == two_steps(make, fake=True, cuda_like=True)
    assert real != two_steps(make, fake=False)


def test_fake_tensors_made_inside_of_either_order_count() -> None:
    for outer_is_fake in (False, True):
        device, mode = VirtualDevice(), FakeTensorMode()
        order: list[Any] = [mode, device] if outer_is_fake else [device, mode]
        with order[0], order[1]:
            net = nn.Linear(1000, 1000, bias=False)
            assert allocated(device) == 4_000_256
            assert device.composition().by_category["parameter"] == 4_000_256
            del net
            assert allocated(device) == 0
