"""The allocator as a program sees it: requests, the miss sequence, streams, statistics. Figures by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory

KIB, MIB = 2**10, 2**20


def test_zero_bytes_are_no_allocation():
    allocator = CachingAllocator(record=True)
    block = allocator.malloc(0)
    assert block is allocator.malloc(0)
    assert block.size == 0
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.free(block)
    assert allocator.stats() == CachingAllocator().stats()
    assert len(allocator.trace) == 0


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=0))
    allocator.malloc(12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB
    allocator.malloc(12 * MIB, stream=0)
    assert allocator.reserved == 24 * MIB


def test_freeing_twice_is_an_error() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(100)
    allocator.free(block)
    with pytest.raises(ValueError, match=r"freed before"):
        allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.record_stream(block, 1)
    assert allocator.allocated == 0


# --- the miss sequence


def test_a_full_device_releases_cached_segments_and_counts_a_retry() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.free(allocator.malloc(24 * MIB))
    block = allocator.malloc(30 * MIB)
    assert block.size == 30 * MIB
    stats = allocator.stats()
    assert (stats.reserved, stats.alloc_retries, stats.ooms) == (30 * MIB, 1, 0)


def test_the_out_of_memory_error_has_every_figure_of_cudas_message() -> None:
    allocator = CachingAllocator(capacity=100 * MIB, used_by_others=10 * MIB)
    allocator.malloc(41 * MIB)
    allocator.malloc(1000)
    cached = allocator.malloc(20 * MIB)
    allocator.free(cached)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(61 * MIB - 5, stream=3)
    error = caught.value
    assert error.requested == 61 * MIB - 5
    assert error.rounded == 61 * MIB
    assert error.segment_size == 62 * MIB
    assert (error.capacity, error.used_by_others) == (100 * MIB, 10 * MIB)
    # The cached 20 MiB went back first: 100 - 10 - 42 - 2 are left, and not enough.
    assert error.reserved == 44 * MIB
    assert error.free == 46 * MIB
    # 41 MiB got the whole 42 MiB: a rest of 1 MiB is not split off.
    assert error.allocated == 42 * MIB + 1024
    assert (error.allowed, error.private_pools, error.stream) == (None, 0, 3)
    assert "a segment of 62.0 MiB" in str(error)
    stats = allocator.stats()
    assert (stats.alloc_retries, stats.ooms, stats.device_used) == (1, 1, 54 * MIB)


def test_the_memory_fraction_refuses_before_the_device_does() -> None:
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    allocator = CachingAllocator(config, capacity=100 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(12 * MIB)
    assert caught.value.allowed == 50 * MIB
    assert caught.value.free == 60 * MIB
    assert "Simulated device out of memory" in str(caught.value)


def test_free_memory_callbacks_run_before_the_cache_is_released() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    held = allocator.malloc(30 * MIB)
    calls: list[str] = []

    def nothing() -> bool:
        calls.append("nothing")
        return False

    def give_up_the_block() -> bool:
        calls.append("block")
        allocator.free(held)
        return True

    allocator.free_memory_callbacks += [give_up_the_block, nothing]
    allocator.malloc(25 * MIB)
    # Both ran, and the block they freed was used as it is: no retry, and the device was not asked.
    assert calls == ["block", "nothing"]
    assert (allocator.alloc_retries, allocator.reserved) == (0, 30 * MIB)


# --- blocks used on other streams


def test_a_block_used_on_another_stream_stays_active_until_that_stream_is_done() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 5)
    allocator.record_stream(block, 6)
    allocator.record_stream(block, 0)  # its own stream needs no waiting
    allocator.free(block)
    stats = allocator.stats()
    assert (stats.allocated, stats.active, stats.requested) == (0, 12 * MIB, 12 * MIB)
    assert allocator.reclaimable == 0
    allocator.synchronize(5)
    assert allocator.stats().active == 12 * MIB
    allocator.malloc(12 * MIB)
    assert allocator.reserved == 24 * MIB
    allocator.synchronize(6)
    stats = allocator.stats()
    assert (stats.active, stats.requested) == (12 * MIB, 12 * MIB)
    allocator.malloc(12 * MIB)
    assert allocator.reserved == 24 * MIB
    assert allocator.memory_stats()["active_bytes.all.peak"] == 24 * MIB


# --- statistics


def test_peaks_fall_to_the_current_values_when_reset() -> None:
    allocator = CachingAllocator()
    kept = allocator.malloc(3 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.empty_cache()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (43 * MIB, 60 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (3 * MIB, 20 * MIB)
    allocator.free(kept)
    assert (allocator.peak_allocated, allocator.allocated) == (3 * MIB, 0)


def test_torch_is_not_imported() -> None:
    code = "import sys, lightning_memtools.memory.allocator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
