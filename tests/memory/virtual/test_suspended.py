"""A device that is suspended is as if it had been left, and goes on afterwards."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated

MIB = 2**20


def test_while_suspended_nothing_counts_and_freed_tensors_free_their_blocks():
    with VirtualDevice() as device:
        first, second = torch.empty(MIB), torch.empty(MIB)
        call = nn.Module.__call__
        with device.suspended():
            assert VirtualDevice.current() is None
            assert nn.Module.__call__ is not call
            third = torch.empty(8 * MIB)
            del first
            assert device.stats().allocated == 4 * MIB
        assert VirtualDevice.current() is device
        assert allocated(device) == 4 * MIB
        fourth = nn.Linear(512, 512)(torch.empty(1024, 512))
        # The second; weights and bias and the input, which the output's graph holds; the output. Not the third.
        assert allocated(device) == (4 + 1 + 2 + 2) * MIB + 2048
        assert device.composition().by_category["activation"] == 2 * MIB
        del second, third, fourth
    assert nn.Module.__call__ is not call
