"""Expandable segments: one range of addresses per stream and pool, with memory mapped behind it page by page.

Where the rules stand in c10/cuda/CUDACachingAllocator.cpp: find_expandable_block, try_allocate_expandable_block,
map_block, unmap_block and release_expandable_segment.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from lightning_memtools.memory.allocator.blocks import FREE, UNMAPPED, Block, FreeBlocks
from lightning_memtools.memory.allocator.reserve import Reserve
from lightning_memtools.memory.allocator.rounding import SMALL_SEGMENT, round_up
from lightning_memtools.memory.sizes import GIB

# The range of an expandable segment when the device has no limit.
_UNLIMITED_RANGE = 1024 * GIB


def grow(reserve: Reserve, free_blocks: FreeBlocks, size: int) -> Block | None:
    """Map memory until one free block holds ``size`` bytes, at the lowest address where that is possible.

    Returns:
        That block, taken out of the free ones; None when the device has too little. Pages mapped before it ran out
        stay in the cache.
    """
    block = _lowest_room(free_blocks, size) or _new_range(reserve, free_blocks)
    if block.state == UNMAPPED:
        mapped = map_pages(reserve, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        # A free block merges with all that is free behind it, so what follows is an unmapped range.
        behind = block.next
        assert behind is not None
        mapped = map_pages(reserve, behind, min(size - block.size, behind.size))
        if mapped is None:
            return None
        block = mapped
    free_blocks.remove(block)
    return block


def map_pages(reserve: Reserve, block: Block, size: int) -> Block | None:
    """Put memory behind the first ``size`` bytes of an unmapped range, rounded up to whole pages.

    Returns:
        The free block that now holds these bytes, merged with its free neighbours; None when the device has too
        little, in which case nothing changes.
    """
    free_blocks = block.free_blocks
    page = block.segment.page_size
    assert page is not None
    size = round_up(size, page)
    if not reserve.device_has(size):
        return None
    free_blocks.unmapped.remove(block)
    if size < block.size:
        _add_unmapped(free_blocks, block.cut(size))
    reserve.count_taken("segment_map", block.address, size, free_blocks)
    before, after = block.prev, block.next
    if before is not None and before.state == FREE:
        free_blocks.remove(before)
        before.absorb(block)
        block = before
    if after is not None and after.state == FREE:
        free_blocks.remove(after)
        block.absorb(after)
    free_blocks.add(block)
    return block


def unmap_pages(reserve: Reserve, block: Block) -> None:
    """Give the whole pages within a free block back to the device; a range without any page left is given up."""
    free_blocks, segment = block.free_blocks, block.segment
    start, size = whole_pages(block)
    if size == 0:
        return
    free_blocks.remove(block)
    if start > block.address:
        front, block = block, block.cut(start - block.address)
        free_blocks.add(front)
    if size < block.size:
        free_blocks.add(block.cut(size))
    before, after = block.prev, block.next
    if before is not None and before.state == UNMAPPED:
        free_blocks.unmapped.remove(before)
        before.absorb(block)
        block = before
    if after is not None and after.state == UNMAPPED:
        free_blocks.unmapped.remove(after)
        block.absorb(after)
    _add_unmapped(free_blocks, block)
    reserve.count_given_back("segment_unmap", start, size, free_blocks)
    if not block.is_split:
        free_blocks.unmapped.remove(block)
        reserve.give_up_range(segment)


def whole_pages(block: Block) -> tuple[int, int]:
    """The pages that lie wholly within a block: where they start, and how many bytes they are."""
    segment = block.segment
    page = segment.page_size
    assert page is not None
    offset = block.address - segment.address
    start = round_up(offset, page)
    end = (offset + block.size) // page * page
    return segment.address + start, max(end - start, 0)


def _lowest_room(free_blocks: FreeBlocks, size: int) -> Block | None:
    """Where free blocks and unmapped ranges side by side, at least one of them unmapped, hold ``size`` bytes."""
    for unmapped in free_blocks.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.state == FREE else unmapped
        room = 0
        block: Block | None = first
        while block is not None and block.state in {FREE, UNMAPPED} and room < size:
            room += block.size
            block = block.next
        if room >= size:
            return first
    return None


def _new_range(reserve: Reserve, free_blocks: FreeBlocks) -> Block:
    page = SMALL_SEGMENT if free_blocks.is_small else reserve.large_segment_size
    # 1 1/8 of the device, so that a block can grow at the end while pages given back before it lie idle.
    total = _UNLIMITED_RANGE if reserve.capacity is None else reserve.capacity + reserve.capacity // 8
    segment = reserve.take_range(free_blocks, round_up(total, page), page)
    _add_unmapped(free_blocks, segment.first)
    return segment.first


def _add_unmapped(free_blocks: FreeBlocks, block: Block) -> None:
    block.state = UNMAPPED
    insort(free_blocks.unmapped, block, key=attrgetter("address"))
