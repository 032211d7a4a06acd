from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn

from lightning_memtools import VirtualDevice
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.memory_releaser import MemoryReleaser, empty_cache, reclaimable_bytes
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.sizes import MIB
from lightning_memtools.memory.stats import MemoryStats


class Cycle:
    """An object that refers to itself, so that only the garbage collector can end its life."""

    def __init__(self, mib: int) -> None:
        self.tensor = torch.empty(mib * MIB, dtype=torch.uint8)
        self.me = self


@pytest.fixture
def device():
    gc.disable()  # Python's own collections would come at moments of their own
    with gc_frozen(), VirtualDevice("1GiB") as device:
        yield device
    gc.enable()


def releaser(device: VirtualDevice, mib: float = 2) -> MemoryReleaser:
    return MemoryReleaser(device, on_device_of(device, torch.device("cpu")), min_share=mib / 1024)


@pytest.fixture
def collections():
    """Counts full collections."""
    seen = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_what_survives_one_collection_does_not_cause_another(device, collections):
    model = nn.Linear(2, 2)
    kept = torch.empty(MIB)
    work = releaser(device)
    for _ in range(3):
        work.collect(model, [])
    assert len(collections) == 1
    more = Cycle(1)
    work.collect(model, [])
    assert len(collections) == 2
    del more
    assert work.collect(model, []).unaccounted == 4 * MIB + MIB  # not above the last time's: left for later
    Cycle(1)
    assert work.collect(model, []).unaccounted == 4 * MIB
    assert len(collections) == 3
    del kept


class Clock:
    """Time that passes when it is told to; a garbage collection takes 2 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.collect = gc.collect

    def read(self) -> float:
        return self.now

    def collect_slowly(self) -> None:
        self.now += 2
        self.collect()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "thread_time", clock.read)
    monkeypatch.setattr(gc, "collect", clock.collect_slowly)
    return clock


def test_a_slow_collection_is_repeated_only_when_it_is_a_small_share_of_the_time_since(device, collections, clock):
    model = nn.Linear(2, 2)
    work = releaser(device, 1)
    for moment, expected_mib in ((10, 0), (50, 1), (90, 2), (213, 0)):  # 2 s are 1% of the 200 s since 12
        clock.now = moment
        Cycle(1)
        retained = work.collect(model, [])
        assert retained.unaccounted == expected_mib * MIB
    assert len(collections) == 2
    Cycle(1)
    assert work.collect(model, []).unaccounted == MIB
    assert work.collect_now(retained.owned).unaccounted == 0


class Stubborn:
    """Stands for a backend whose allocator has no way to release memory, as torch's generic one raises."""

    def __init__(self, device: VirtualDevice, error: Exception) -> None:
        self.name, self.simulated, self.stats = "odd:0", True, device.stats
        self.reset_peaks, self.composition_at_peak = device.reset_peaks, device.composition_at_peak
        self.error = error
        self.n_tries = 0

    def empty_cache(self) -> None:
        self.n_tries += 1
        raise self.error


def test_a_device_that_cannot_empty_its_cache_is_asked_once(device):
    model = nn.Linear(2, 2)
    torch.empty(30 * MIB, dtype=torch.uint8)
    reader = Stubborn(device, NotImplementedError("no emptyCache on this backend"))
    work = MemoryReleaser(reader, device.holds, min_share=2 / 1024)
    for _ in range(2):
        assert work.release(model, [])[0].freed_bytes == 0
    assert reader.n_tries == 1
    assert work.cannot_empty.startswith("odd:0 ")
    assert "no emptyCache" in work.cannot_empty


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
