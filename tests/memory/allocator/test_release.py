"""Rules 6 (oversize release, garbage collection) and 9 (empty_cache)."""

from __future__ import annotations

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator

MIB = 2**20


def cached(allocator: CachingAllocator, *segments: int) -> list[Block]:
    blocks = [allocator.malloc(size) for size in segments]
    for block in blocks:
        allocator.free(block)
    return blocks


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


def test_one_oversize_block_that_is_large_enough_is_released_and_no_other() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"), capacity=200 * MIB)
    cached(allocator, 50 * MIB, 90 * MIB, 20 * MIB)
    allocator.malloc(60 * MIB)  # 90 is 20 MiB or more too large to be taken, and 40 are left
    assert held_segments(allocator) == [50, 20, 60]
    assert (allocator.alloc_retries, allocator.ooms) == (0, 0)


def test_oversize_blocks_are_released_from_the_largest_until_there_is_enough() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"), capacity=200 * MIB)
    cached(allocator, 42 * MIB, 60 * MIB, 50 * MIB, 20 * MIB)
    allocator.malloc(100 * MIB)  # 60, then 50: together more than 100
    assert held_segments(allocator) == [42, 20, 100]
    assert allocator.alloc_retries == 0


def test_everything_is_released_when_oversize_blocks_are_not_enough() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"), capacity=200 * MIB)
    cached(allocator, 42 * MIB, 60 * MIB, 50 * MIB, 20 * MIB)
    allocator.malloc(180 * MIB)
    assert held_segments(allocator) == [180]
    assert allocator.alloc_retries == 1


def test_a_small_request_releases_no_oversize_block_before_the_retry() -> None:
    # release_available_cached_blocks looks in the request's own pool.
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"), capacity=100 * MIB)
    cached(allocator, 50 * MIB, 50 * MIB)
    allocator.malloc(4)
    assert allocator.alloc_retries == 1
    assert held_segments(allocator) == [2]


GARBAGE = AllocatorConfig.parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8")


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


def test_below_the_threshold_nothing_is_released() -> None:
    allocator = CachingAllocator(GARBAGE, capacity=250 * MIB)
    cached(allocator, 30 * MIB, 32 * MIB)
    allocator.malloc(36 * MIB)
    assert held_segments(allocator) == [30, 32, 36]


def test_small_private_and_split_blocks_are_not_garbage() -> None:
    allocator = CachingAllocator(GARBAGE, capacity=250 * MIB)
    kept = allocator.malloc(3 * MIB)  # its 20 MiB segment is split
    cached(allocator, 512, 12 * MIB)
    allocator.free(allocator.malloc(90 * MIB, pool=1))
    allocator.malloc(40 * MIB)
    assert held_segments(allocator) == [20, 2, 90, 40]
    assert kept.allocated


def test_without_a_memory_fraction_there_is_no_collection() -> None:
    allocator = CachingAllocator(AllocatorConfig(garbage_collection_threshold=0.1), capacity=250 * MIB)
    cached(allocator, 30 * MIB)
    allocator.malloc(200 * MIB)
    assert held_segments(allocator) == [30, 200]
