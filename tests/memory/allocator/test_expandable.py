"""Rule 10: expandable segments. 2 MiB pages for small blocks, 20 MiB pages for large ones."""

from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.allocator.blocks import UNMAPPED

KIB, MIB, GIB = 2**10, 2**20, 2**30
EXPANDABLE = AllocatorConfig.parse("expandable_segments:True")


def expandable(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(EXPANDABLE, capacity=capacity)


def layout(allocator: CachingAllocator) -> list[str]:
    """Blocks by address: "a" allocated, "f" free, "u" unmapped (without its size), sizes in MiB."""
    return [
        "u" if block.state == UNMAPPED else f"{'a' if block.allocated else 'f'}{block.size / MIB:g}"
        for block in allocator.blocks()
    ]


def test_large_blocks_map_pages_of_20_mib() -> None:
    allocator = expandable()
    allocator.malloc(3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.malloc(25 * MIB)  # 17 MiB are free behind the first: one page more is enough
    assert allocator.reserved == 40 * MIB
    assert layout(allocator) == ["a3", "a25", "f12", "u"]
    allocator.malloc(53 * MIB)
    assert allocator.reserved == 100 * MIB


def test_emptying_the_cache_unmaps_every_whole_free_page() -> None:
    allocator = expandable()
    blocks = [allocator.malloc(size * MIB) for size in (30, 50, 15)]
    assert allocator.reserved == 100 * MIB
    allocator.free(blocks[1])
    # 30 to 80 MiB are free: of the pages at 20, 40, 60 and 80, those at 40 and 60 wholly.
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    assert layout(allocator) == ["a30", "f10", "u", "a15", "f5", "u"]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


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
    ordinary.malloc(80 * MIB)
    held = [ordinary.malloc(9 * MIB) for _ in range(2)]
    ordinary.free(held[0])
    with pytest.raises(SimulatedOutOfMemory):
        ordinary.malloc(12 * MIB)  # the free part of a split segment does not move
