"""Private pools with the options of `torch.cuda.MemPool`, by arithmetic."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory, replay

MIB = 2**20


def sizes(allocator: CachingAllocator) -> list[list[int]]:
    return [[block.size // MIB for block in segment.blocks()] for segment in allocator.segments()]


def test_a_pool_that_never_splits_gives_each_request_a_whole_segment():
    allocator = CachingAllocator()
    allocator.set_pool_options(1, no_split=True)
    kept = [allocator.malloc(4 * MIB, pool=1), allocator.malloc(4 * MIB, pool=1)]
    allocator.malloc(4 * MIB, pool=2)
    allocator.malloc(4 * MIB, pool=2)
    assert sizes(allocator) == [[20], [20], [4, 4, 12]]
    assert allocator.allocated == (20 + 20 + 4 + 4) * MIB
    assert allocator.stats().requested == 16 * MIB
    allocator.free(kept[0])
    assert allocator.malloc(9 * MIB, pool=1).address == kept[0].address


def test_the_default_pool_takes_free_blocks_of_a_last_resort_before_it_runs_out():
    allocator = CachingAllocator(AllocatorConfig(), capacity=80 * MIB)
    allocator.set_pool_options(2, use_on_oom=True)
    plain, last = allocator.malloc(40 * MIB, pool=1), allocator.malloc(40 * MIB, pool=2)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(40 * MIB)
    allocator.free(plain)
    allocator.free(last)
    block = allocator.malloc(30 * MIB)
    assert block.address == last.address
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(30 * MIB)
    with pytest.raises(SimulatedOutOfMemory):  # another private pool is not served
        allocator.malloc(42 * MIB, pool=3)
    allocator.free(block)
    assert allocator.malloc(20 * MIB, pool=2).address == last.address  # it went back to where it came from
    assert (allocator.alloc_retries, allocator.ooms) == (3, 3)


def test_a_pool_that_nobody_uses_any_more_is_no_last_resort():
    allocator = CachingAllocator(capacity=80 * MIB)
    allocator.set_pool_options(1, use_on_oom=True)
    allocator.free(allocator.malloc(40 * MIB, pool=1))
    kept = allocator.malloc(40 * MIB)
    allocator.release_pool(1)
    assert allocator.malloc(20 * MIB).address != kept.address
    assert sizes(allocator) == [[40], [20]]  # what the pool had was released, and a new segment reserved


def test_a_trace_holds_the_options():
    allocator = CachingAllocator(capacity=82 * MIB, record=True)
    allocator.set_pool_options(1, no_split=True, use_on_oom=True)
    allocator.free(allocator.malloc(60 * MIB, pool=1))
    allocator.malloc(30 * MIB)
    allocator.set_pool_options(2)
    allocator.free(allocator.malloc(3 * MIB, pool=2))
    allocator.delete_pool(2)
    assert allocator.trace is not None
    again = replay(allocator.trace)
    assert again.completed
    assert again.allocator.memory_stats() == allocator.memory_stats()
    assert sizes(again.allocator) == sizes(allocator) == [[60]]


def test_a_pool_that_is_deleted_gives_its_unused_segments_back_at_once_and_the_others_with_the_next():
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(30 * MIB, pool=1), allocator.malloc(40 * MIB, pool=1)
    allocator.free(gone)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.delete_pool(1)
    assert sizes(allocator) == [[30], [50]]  # the default pool keeps its cache
    allocator.free(kept)
    allocator.empty_cache()
    assert sizes(allocator) == []


def test_options_are_only_for_new_private_pools():
    allocator = CachingAllocator()
    allocator.malloc(1, pool=1)
    with pytest.raises(ValueError, match=r"Pool 0 .*the default pool"):
        allocator.set_pool_options(0, no_split=True)
    with pytest.raises(ValueError, match=r"Pool 1 .*has memory already"):
        allocator.set_pool_options(1, use_on_oom=True)
