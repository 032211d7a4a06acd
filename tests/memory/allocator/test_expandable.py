"""Rule 10: expandable segments. 2 MiB pages for small blocks, 20 MiB pages for large ones."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30
EXPANDABLE = AllocatorConfig.parse("expandable_segments:True")


def expandable(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(EXPANDABLE, capacity=capacity)


def layout(allocator: CachingAllocator) -> list[str]:
    """Blocks by address: "a" allocated, "f" free, "u" unmapped (without its size), sizes in MiB."""
    marks = "faWu"
    return ["u" if block.state == 3 else f"{marks[block.state]}{block.size / MIB:g}" for block in allocator.blocks()]


def test_large_blocks_map_pages_of_20_mib() -> None:
    allocator = expandable()
    allocator.malloc(3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.malloc(25 * MIB)  # 17 MiB are free behind the first: one page more is enough
    assert allocator.reserved == 40 * MIB
    assert layout(allocator) == ["a3", "a25", "f12", "u"]
    allocator.malloc(53 * MIB)
    assert allocator.reserved == 100 * MIB


def test_small_blocks_map_pages_of_2_mib() -> None:
    allocator = expandable()
    allocator.malloc(MIB)
    allocator.malloc(MIB // 2)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(MIB)
    assert allocator.reserved == 4 * MIB
    assert layout(allocator) == ["a1", "a0.5", "a1", "f1.5", "u"]


def test_large_blocks_are_split_to_the_last_512_bytes_too() -> None:
    allocator = expandable()
    assert allocator.malloc(20 * MIB - 512).size == 20 * MIB - 512
    assert [block.size for block in allocator.blocks()][:2] == [20 * MIB - 512, 512]


def test_another_large_segment_size_is_the_page_size() -> None:
    config = AllocatorConfig.parse("expandable_segments:True,large_segment_size_mb:32")
    allocator = CachingAllocator(config)
    allocator.malloc(3 * MIB)
    assert allocator.reserved == 32 * MIB


def test_growing_sizes_fill_one_range_without_slivers() -> None:
    # The case that expandable segments are for: with ordinary ones each step leaves its segment behind.
    ordinary, growing = CachingAllocator(), expandable()
    for size in range(20, 60, 4):
        for allocator in (ordinary, growing):
            allocator.free(allocator.malloc(size * MIB))
    assert ordinary.reserved == sum(range(20, 60, 4)) * MIB
    assert growing.reserved == 60 * MIB


def test_a_free_block_at_the_growing_end_counts_with_the_range_behind_it() -> None:
    # Not in the facts file: of two blocks that fit, torch prefers the larger one when it cannot grow.
    allocator = expandable()
    first = allocator.malloc(30 * MIB)
    allocator.malloc(25 * MIB)
    assert layout(allocator) == ["a30", "a25", "f5", "u"]
    allocator.free(first)
    block = allocator.malloc(4 * MIB)
    assert block.address == first.address
    assert layout(allocator) == ["a4", "f26", "a25", "f5", "u"]


def test_streams_and_pools_have_ranges_of_their_own() -> None:
    allocator = expandable()
    allocator.malloc(3 * MIB)
    allocator.malloc(3 * MIB, stream=1)
    allocator.malloc(3 * MIB, pool=1)
    allocator.malloc(512)
    assert [segment.mapped // MIB for segment in allocator.segments()] == [20, 20, 20, 2]


def test_emptying_the_cache_unmaps_every_whole_free_page() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size * MIB) for size in (30, 50, 15)]
    assert allocator.reserved == 100 * MIB
    allocator.free(blocks[1])
    # 30 to 80 MiB are free: of the pages at 20, 40, 60 and 80, those at 40 and 60 wholly.
    assert allocator.reclaimable == 40 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    assert layout(allocator) == ["a30", "f10", "u", "a15", "f5", "u"]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


def test_gaps_are_filled_before_the_range_grows_at_the_lowest_address_with_room() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size * MIB) for size in (30, 50, 20)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert layout(allocator) == ["a30", "f10", "u", "a20", "u"]
    # 45 MiB fit where the 50 were: both pages come back.
    block = allocator.malloc(45 * MIB)
    assert block.address == blocks[1].address
    assert allocator.reserved == 100 * MIB
    assert layout(allocator) == ["a30", "a45", "f5", "a20", "u"]


def test_a_gap_too_small_is_passed_over() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size * MIB) for size in (30, 50, 20)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    block = allocator.malloc(60 * MIB)
    assert block.address == blocks[2].address + 20 * MIB
    assert layout(allocator) == ["a30", "f10", "u", "a20", "a60", "u"]


def test_nothing_counts_as_inactive_split_or_as_a_segment() -> None:
    allocator = expandable()
    allocator.malloc(3 * MIB)
    allocator.malloc(512)
    stats = allocator.memory_stats()
    assert stats["inactive_split_bytes.all.peak"] == 0
    assert stats["segment.all.peak"] == 0
    assert (stats["reserved_bytes.large_pool.current"], stats["num_device_alloc"]) == (20 * MIB, 2)


def test_on_a_full_device_free_pages_move_to_where_they_are_needed() -> None:
    allocator = expandable(capacity=100 * MIB)
    blocks = [allocator.malloc(20 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.free(block)
    # Three pages of 20 MiB are free but not adjacent. Ordinary segments would run out here.
    block = allocator.malloc(60 * MIB)
    assert (allocator.reserved, allocator.alloc_retries, allocator.ooms) == (100 * MIB, 1, 0)
    assert block.size == 60 * MIB
    ordinary = CachingAllocator(capacity=100 * MIB)
    held = [ordinary.malloc(20 * MIB) for _ in range(5)]
    for block in held[::2]:
        ordinary.free(block)
    assert ordinary.malloc(60 * MIB).size == 60 * MIB  # whole segments move as well ...
    ordinary = CachingAllocator(capacity=100 * MIB)
    ordinary.malloc(80 * MIB)
    held = [ordinary.malloc(9 * MIB) for _ in range(2)]
    ordinary.free(held[0])
    with pytest.raises(SimulatedOutOfMemory):
        ordinary.malloc(12 * MIB)  # ... but not the free part of a split one


def test_pages_mapped_before_memory_ran_out_stay_cached() -> None:
    allocator = expandable(capacity=110 * MIB)
    blocks = [allocator.malloc(size * MIB) for size in (20, 20, 20, 20)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    # Room for 60 MiB only at the end: two pages more than the 110 - 60 hold.
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(60 * MIB)
    assert caught.value.segment_size == 60 * MIB
    assert caught.value.free == 50 * MIB
    assert allocator.reserved == 60 * MIB
    assert allocator.malloc(20 * MIB).address == blocks[1].address


def test_a_memory_fraction_is_compared_with_the_size_of_an_ordinary_segment() -> None:
    # As torch does: 4 MiB more would map nothing, but 20 MiB are asked for in the comparison.
    config = AllocatorConfig.parse("expandable_segments:True,per_process_memory_fraction:0.5")
    allocator = CachingAllocator(config, capacity=100 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(4 * MIB)


def test_the_range_is_one_and_an_eighth_of_the_device() -> None:
    allocator = expandable(capacity=160 * MIB)
    allocator.malloc(3 * MIB)
    assert [segment.size for segment in allocator.segments()] == [180 * MIB]


def test_oversize_rules_hold_for_expandable_segments_too() -> None:
    config = AllocatorConfig.parse("expandable_segments:True,max_split_size_mb:40")
    allocator = CachingAllocator(config)
    allocator.free(allocator.malloc(60 * MIB))
    # The free 60 MiB are not taken for 10 MiB, and the range has room behind them only after mapping more; but the
    # search for room begins with the free block itself, so it is used after all, without mapping anything.
    block = allocator.malloc(10 * MIB)
    assert allocator.reserved == 60 * MIB
    assert block.address == allocator.segments()[0].address
