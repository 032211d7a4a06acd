"""Rules 6 (oversize release, garbage collection) and 9 (empty_cache)."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator
from tests.memory.allocator.pair import cached

MIB = 2**20


def held_segments(allocator: CachingAllocator) -> list[int]:
    return [segment.size // MIB for segment in allocator.segments()]


def test_emptying_the_cache_spares_segments_in_use() -> None:
    allocator = CachingAllocator()
    used = [allocator.malloc(3 * MIB), allocator.malloc(4)]
    cached(allocator, 18 * MIB, 30 * MIB)
    assert allocator.reclaimable == 48 * MIB
    allocator.empty_cache()
    assert held_segments(allocator) == [20, 2]
    assert allocator.stats().inactive_split == 17 * MIB + 2 * MIB - 512
    for block in used:
        allocator.free(block)
    assert allocator.reclaimable == 22 * MIB


SPLIT = AllocatorConfig.parse("max_split_size_mb:40")
GARBAGE = AllocatorConfig.parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8")


@pytest.mark.parametrize(
    ("config", "capacity", "kept", "held", "retries"),
    [
        # The oversize block that is large enough, and no other: 90 is 20 MiB or more too large to be taken.
        (SPLIT, 200, (50, 90, 20, 60), [50, 20, 60], 0),
        # From the largest until there is enough: 60, then 50, together more than 100.
        (SPLIT, 200, (42, 60, 50, 20, 100), [42, 20, 100], 0),
        # Everything where oversize blocks are not enough.
        (SPLIT, 200, (42, 60, 50, 20, 180), [180], 1),
        # release_available_cached_blocks looks in the request's own pool: a small one releases no oversize block.
        (SPLIT, 100, (50, 50, 4 / MIB), [2], 1),
        # Below the threshold, and without a memory fraction, no garbage is collected.
        (GARBAGE, 250, (30, 32, 36), [30, 32, 36], 0),
        (AllocatorConfig(garbage_collection_threshold=0.1), 250, (30, 200), [30, 200], 0),
    ],
)
def test_what_a_request_releases_of_the_cache(config, capacity, kept, held, retries):
    allocator = CachingAllocator(config, capacity=capacity * MIB)
    *segments, asked = (int(mib * MIB) for mib in kept)
    cached(allocator, *segments)
    allocator.malloc(asked)
    assert held_segments(allocator) == held
    assert (allocator.alloc_retries, allocator.ooms) == (retries, 0)


def test_above_the_threshold_the_oldest_cached_segments_are_released() -> None:
    allocator = CachingAllocator(GARBAGE, capacity=250 * MIB)  # 200 allowed, collected above 100
    old = allocator.malloc(30 * MIB)
    allocator.free(old)
    middle, young = allocator.malloc(32 * MIB), allocator.malloc(60 * MIB)
    allocator.free(middle)
    allocator.free(young)
    # 122 MiB are held, so at least 22 have to go. Lookups since they were freed, this one counted: 3, 1 and 1. The
    # average is 5/3, and only the first is that old.
    assert allocator.reserved == 122 * MIB
    allocator.malloc(64 * MIB)
    assert held_segments(allocator) == [32, 60, 64]
    assert allocator.alloc_retries == 0


def test_collection_continues_with_the_new_average_age_until_enough_is_released() -> None:
    allocator = CachingAllocator(GARBAGE, capacity=250 * MIB)
    oldest = allocator.malloc(12 * MIB)
    allocator.free(oldest)
    blocks = [allocator.malloc(size * MIB) for size in (14, 100)]
    for block in blocks:
        allocator.free(block)
    # 126 MiB held, 26 to go. First 12 (age 3 of 3, 1, 1), then the other two, equally old: both go.
    allocator.malloc(110 * MIB)
    assert held_segments(allocator) == [110]


def test_small_private_and_split_blocks_are_not_garbage() -> None:
    allocator = CachingAllocator(GARBAGE, capacity=250 * MIB)
    kept = allocator.malloc(3 * MIB)  # its 20 MiB segment is split
    cached(allocator, 512, 12 * MIB)
    allocator.free(allocator.malloc(90 * MIB, pool=1))
    allocator.malloc(40 * MIB)
    assert held_segments(allocator) == [20, 2, 90, 40]
    assert kept.allocated
