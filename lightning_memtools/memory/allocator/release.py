"""Giving cached memory back to the device: all of it, the oversize blocks, or what has not been used for long."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memtools.memory.allocator.blocks import FreeBlocks
from lightning_memtools.memory.allocator.expandable import unmap_pages, whole_pages
from lightning_memtools.memory.allocator.reserve import Reserve


def release_cached(reserve: Reserve, pools: Iterable[FreeBlocks]) -> None:
    """Give back every segment without a used block; of expandable segments every whole free page (release_blocks)."""
    for free_blocks in pools:
        for block in list(free_blocks.blocks):  # a copy: giving back changes the list
            if block.is_expandable:
                unmap_pages(reserve, block)
            elif not block.is_split:
                reserve.give_back_segment(block)


def reclaimable(pools: Iterable[FreeBlocks]) -> int:
    """What `release_cached` would give back, in bytes."""
    total = 0
    for free_blocks in pools:
        for block in free_blocks.blocks:
            if block.is_expandable:
                total += whole_pages(block)[1]
            elif not block.is_split:
                total += block.size
    return total


def release_oversize(reserve: Reserve, free_blocks: FreeBlocks, size: int, max_split: int) -> bool:
    """Give back oversize cached blocks of one stream, just enough for a request (release_available_cached_blocks).

    One block that is large enough, else the largest ones until they add up.

    Returns:
        Whether as much as the request needs went back.
    """
    wanted = max(size, max_split)
    index = free_blocks.first_of_at_least(wanted)
    blocks = free_blocks.blocks
    if index < len(blocks) and not blocks[index].is_expandable:
        # A block of at least max_split_size is never split, so it is a whole segment.
        reserve.give_back_segment(blocks[index])
        return True
    released = 0
    for block in reversed(blocks[:index]):
        if released >= wanted or block.size < max_split:
            break
        if not block.is_expandable:
            released += block.size
            reserve.give_back_segment(block)
    return released >= wanted


def collect_garbage(reserve: Reserve, pools: Iterable[FreeBlocks], lookups: int, threshold: float) -> None:
    """Give back large cached segments that were not used for long, when the share in use passes the threshold.

    Segments at least as old as the average go, in rounds, until enough went; a block's age is the number of lookups
    since it was freed (garbage_collect_cached_blocks).

    Args:
        reserve: What is held of the device; it must have an allowance.
        pools: The default pool's large free blocks, one set per stream.
        lookups: How many lookups these have seen.
        threshold: The share of the allowance above which memory goes back.
    """
    assert reserve.allowed is not None
    target = reserve.whole.reserved - int(threshold * reserve.allowed)
    # torch counts whole expandable blocks here too, but never gives them back; there are none, since such a segment
    # always ends in an unmapped range.
    candidates = [block for free_blocks in pools for block in free_blocks.blocks if not block.is_split]
    total_age = sum(lookups - block.age_base for block in candidates)
    released = 0
    while released < target and candidates:
        average_age = total_age / len(candidates)
        # The oldest is never younger than the average, so every round gives something back.
        old = [block for block in candidates if lookups - block.age_base >= average_age]
        candidates = [block for block in candidates if lookups - block.age_base < average_age]
        for block in old:
            released += block.size
            total_age -= lookups - block.age_base
            reserve.give_back_segment(block)
