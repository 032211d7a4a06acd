from __future__ import annotations

import pytest
import torch

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.memory_releaser import ReleaseThreshold, empty_cache, reclaimable_bytes
from lightning_memtools.memory.sizes import GIB, MIB
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


@pytest.mark.parametrize(
    ("minimum", "stats", "bound"),
    [
        (0.05, MemoryStats(allocated=0, reserved=2 * GIB, capacity=20 * GIB), GIB),
        (0.05, MemoryStats(allocated=0, reserved=2 * GIB), GIB // 10),  # no capacity: of what is reserved
        (1.0, MemoryStats(allocated=0, reserved=2 * GIB, capacity=3 * GIB), 3 * GIB),
        (1, MemoryStats(allocated=0, reserved=2 * GIB), 2 * GIB),
        ("512MiB", MemoryStats(allocated=0, reserved=2 * GIB, capacity=20 * GIB), 512 * MIB),
    ],
)
def test_the_minimum_is_a_share_or_a_size(minimum, stats, bound):
    threshold = ReleaseThreshold(minimum)
    assert threshold.minimum_bytes(stats) == pytest.approx(bound)


@pytest.mark.parametrize("minimum", [-0.1, 1.5, 2, True, float("nan"), "512", "lots", "-1MiB", ""])
def test_other_values_are_refused_with_what_is_accepted(minimum):
    with pytest.raises(ValueError, match=r"neither a share .*from 0 to 1.*\"512MiB\"") as error:
        ReleaseThreshold(minimum)
    assert repr(minimum) in str(error.value)
