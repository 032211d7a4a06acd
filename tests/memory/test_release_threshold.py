from __future__ import annotations

import torch

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.memory_releaser import empty_cache, reclaimable_bytes
from lightning_memtools.memory.sizes import MIB
from lightning_memtools.memory.stats import MemoryStats


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_what_can_be_released_is_what_empty_cache_releases():
    with VirtualDevice() as device:
        kept = block(30)  # a segment of its own
        whole = block(40)
        split = block(50)
        del whole, split
        pin = block(20)  # the front of the 40 MiB segment: the smallest that fits
        assert device.stats().reserved == 120 * MIB
        assert reclaimable_bytes(device.stats()) == 50 * MIB
        assert empty_cache(device) == 50 * MIB
        assert device.stats().reserved == 70 * MIB
        assert reclaimable_bytes(device.stats()) == 0
        del kept, pin


def test_a_device_that_counts_no_splits_gives_an_upper_bound_and_one_without_a_cache_nothing():
    assert reclaimable_bytes(MemoryStats(allocated=10, reserved=100)) == 90
    assert reclaimable_bytes(MemoryStats(allocated=10)) == 0
    assert reclaimable_bytes(MemoryStats(allocated=10, reserved=5)) == 0
