"""The allocator as a program sees it: requests, the miss sequence, streams, statistics. Figures by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.stats import MemoryStats

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


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        CachingAllocator().malloc(-1)


def test_one_element_takes_512_bytes_of_a_2_mib_segment() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(4)
    assert (block.size, block.requested) == (512, 4)
    assert allocator.stats() == MemoryStats(
        allocated=512,
        reserved=2 * MIB,
        active=512,
        inactive_split=2 * MIB - 512,
        requested=4,
        peak_allocated=512,
        peak_reserved=2 * MIB,
        alloc_retries=0,
        ooms=0,
    )


def test_small_large_small_batches_leave_reserved_high_until_the_cache_is_emptied() -> None:
    # Article A: the memory of a program whose batches change their shape only rises.
    allocator = CachingAllocator()

    def batch(n_bytes: int) -> int:
        blocks = [allocator.malloc(n_bytes) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        return allocator.reserved

    assert batch(12 * MIB) == 36 * MIB
    # The cached 12 MiB segments are too small: three of 30 MiB more.
    assert batch(30 * MIB) == 36 * MIB + 90 * MIB
    assert batch(12 * MIB) == 126 * MIB
    assert allocator.allocated == 0
    assert allocator.reclaimable == 126 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert allocator.peak_reserved == 126 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=0))
    allocator.malloc(12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB
    allocator.malloc(12 * MIB, stream=0)
    assert allocator.reserved == 24 * MIB


def test_private_pools_share_with_nobody_and_keep_their_segments_until_released() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB))
    allocator.free(allocator.malloc(12 * MIB, pool=1))
    assert allocator.reserved == 24 * MIB
    # Not in the facts file, which lets every unsplit segment go: release_cached_blocks spares pools in use.
    assert allocator.reclaimable == 12 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 12 * MIB
    allocator.release_pool(1)
    assert allocator.reclaimable == 12 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 0


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


def test_after_out_of_memory_smaller_requests_still_work() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    held = allocator.malloc(20 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(30 * MIB)
    allocator.free(held)
    assert allocator.malloc(30 * MIB).size == 30 * MIB


def test_a_capacity_is_reached_exactly() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.malloc(40 * MIB)
    assert allocator.device_free == 0
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(1)


def test_other_processes_may_allocate_and_free_memory() -> None:
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.used_by_others = 30 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(12 * MIB)
    allocator.used_by_others = 0
    allocator.malloc(12 * MIB)
    assert (allocator.used_by_others, allocator.device_free) == (0, 28 * MIB)


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


def test_the_error_names_the_free_memory_of_private_pools() -> None:
    allocator = CachingAllocator(capacity=60 * MIB)
    allocator.free(allocator.malloc(12 * MIB, pool=1))
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(50 * MIB)
    assert caught.value.private_pools == 12 * MIB


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


def test_waiting_blocks_do_not_merge() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.record_stream(first, 1)
    allocator.free(first)
    allocator.free(second)
    assert [(block.size, block.state) for block in allocator.blocks()] == [(4 * MIB, 2), (16 * MIB, 0)]
    allocator.synchronize()
    assert [(block.size, block.state) for block in allocator.blocks()] == [(20 * MIB, 0)]


def test_emptying_the_cache_waits_for_all_streams() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 5)
    allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.stats().active) == (0, 0)


def test_a_request_without_memory_waits_for_all_streams() -> None:
    allocator = CachingAllocator(capacity=20 * MIB)
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 5)
    allocator.free(block)
    allocator.malloc(16 * MIB)
    assert (allocator.reserved, allocator.alloc_retries) == (16 * MIB, 1)


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


def test_every_counter_of_a_short_program() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(600)  # 1024 B of a 2 MiB segment
    second = allocator.malloc(3 * MIB + 1)  # 3 MiB + 512 B of a 20 MiB segment
    allocator.free(first)
    stats = allocator.memory_stats()
    expected = {
        "allocation": (1, 2, 2, 1),
        "allocated_bytes": (3 * MIB + 512, 3 * MIB + 1536, 3 * MIB + 1536, 1024),
        "requested_bytes": (3 * MIB + 1, 3 * MIB + 601, 3 * MIB + 601, 600),
        "active": (1, 2, 2, 1),
        "active_bytes": (3 * MIB + 512, 3 * MIB + 1536, 3 * MIB + 1536, 1024),
        "segment": (2, 2, 2, 0),
        "reserved_bytes": (22 * MIB, 22 * MIB, 22 * MIB, 0),
        "inactive_split": (1, 2, 2, 1),
        # The rest of the small segment, 2 MiB - 1024, was one until the segment was whole again.
        "inactive_split_bytes": (17 * MIB - 512, 19 * MIB - 1536, 19 * MIB - 1536, 2 * MIB - 1024),
    }
    for metric, (current, peak, allocated, freed) in expected.items():
        of_all = tuple(stats[f"{metric}.all.{kind}"] for kind in ("current", "peak", "allocated", "freed"))
        assert of_all == (current, peak, allocated, freed), metric
    assert stats["allocated_bytes.small_pool.current"] == 0
    assert stats["allocated_bytes.small_pool.peak"] == 1024
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB
    assert (stats["num_device_alloc"], stats["num_device_free"], stats["num_sync_all_streams"]) == (2, 0, 0)
    allocator.free(second)
    allocator.empty_cache()
    stats = allocator.memory_stats()
    assert (stats["num_device_alloc"], stats["num_device_free"], stats["num_sync_all_streams"]) == (2, 2, 1)
    assert {value for name, value in stats.items() if name.endswith(".current")} == {0}


def test_the_names_are_those_of_torch() -> None:
    stats = CachingAllocator().memory_stats()
    assert len(stats) == 9 * 3 * 4 + 2 * 4 + 6
    assert list(stats) == sorted(stats)
    assert {name for name in stats if "." not in name} == {
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "max_split_size",
    }


def test_oversize_blocks_and_segments_are_counted() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"))
    blocks = [allocator.malloc(size * MIB) for size in (40, 39, 50)]
    allocator.free(blocks[0])
    stats = allocator.memory_stats()

    def of(metric: str) -> tuple[int, ...]:
        return tuple(stats[f"oversize_{metric}.{kind}"] for kind in ("current", "peak", "allocated", "freed"))

    # 39 MiB were given a segment of 40 whole, since a rest of 1 MiB is not split off: both count.
    assert of("allocations") == (2, 3, 3, 1)
    assert of("segments") == (3, 3, 3, 0)
    allocator.empty_cache()
    allocator.reset_peaks()
    stats = allocator.memory_stats()
    assert of("segments") == (2, 2, 3, 1)
    assert of("allocations") == (2, 2, 3, 1)
    assert stats["max_split_size"] == 40 * MIB
    assert CachingAllocator().memory_stats()["max_split_size"] == -1


def test_torch_is_not_imported() -> None:
    code = "import sys, lightning_memtools.memory.allocator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(("every", "reserved_mib"), [(1, 128), (5, 384), (100, 704)])
def test_batches_that_a_second_stream_fetches_wait_for_each_synchronize(every, reserved_mib):
    allocator = CachingAllocator()
    following = allocator.malloc(64 * MIB, stream=1)
    for step in range(1, 11):
        batch, following = following, allocator.malloc(64 * MIB, stream=1)
        allocator.record_stream(batch, 0)
        allocator.free(batch)
        if step % every == 0:
            allocator.synchronize()
    assert allocator.stats().peak_allocated == 128 * MIB
    assert allocator.stats().peak_reserved == reserved_mib * MIB
