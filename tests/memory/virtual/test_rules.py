"""Rules that stand in for operators: their results, and what they hold meanwhile, are on the device."""

from __future__ import annotations

import pytest
import torch

from lightning_memtools.memory.cuda_ops.reductions import workspaces
from lightning_memtools.memory.sizes import GpuShape
from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated, peak

MIB = 2**20
aten = torch.ops.aten


def holding_more(call):
    call.hold(8 * MIB)
    out = call.results()
    call.release(8 * MIB)
    call.hold(2 * MIB)
    return out


def test_what_a_rule_holds_is_free_when_it_has_returned():
    device = VirtualDevice()
    device.apply_rules({aten.relu.default: holding_more})
    with device:
        x = torch.zeros(MIB // 4)
        out = x.relu()
        assert allocated(device) == 2 * MIB
        assert peak(device) == (2 + 8) * MIB
        with device.host():
            torch.zeros(MIB).relu()
        assert peak(device) == (2 + 8) * MIB
        del out


def test_what_a_rule_holds_can_be_what_does_not_fit():
    device = VirtualDevice("8MiB")
    device.apply_rules({aten.relu.default: holding_more})
    with device:
        x = torch.zeros(MIB // 4)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"):
            x.relu()
        assert allocated(device) == MIB


def test_a_device_of_real_tensors_applies_no_rules_of_cuda():
    x = torch.zeros(8192, 1024)
    assert workspaces(x, [0], GpuShape(), part_bytes=4)
    with VirtualDevice(cuda_like=True) as device:
        x.sum(0)
        assert peak(device) == 4 * 1024


def test_a_gradient_that_somebody_holds_is_not_written_to():
    held = []
    with VirtualDevice():
        leaf = torch.ones(4, requires_grad=True)
        hidden = leaf * 2
        first, second = hidden + 0, hidden + 0
        first.register_hook(held.append)
        second.register_hook(held.append)
        (first * 3 + second * 5).sum().backward()
    assert sorted(gradient[0].item() for gradient in held) == [3.0, 5.0]
    assert torch.equal(leaf.grad, torch.full((4,), 16.0))
