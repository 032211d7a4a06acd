"""Rules 5 (lookup), 6 (release), 7 (split), 8 (merge) and 9 (empty_cache), one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator

KIB, MIB = 2**10, 2**20


def cached(allocator: CachingAllocator, *segments: int) -> list[Block]:
    """Leave free segments of these sizes in the cache, in this order of age."""
    blocks = [allocator.malloc(size) for size in segments]
    for block in blocks:
        allocator.free(block)
    return blocks


def sizes(allocator: CachingAllocator) -> list[tuple[int, bool]]:
    """Every block's size in KiB, and whether it is allocated, by address."""
    return [(block.size // KIB, block.allocated) for block in allocator.blocks()]


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    thirty, twelve, fourteen = cached(allocator, 30 * MIB, 12 * MIB, 14 * MIB)
    assert allocator.malloc(13 * MIB).address == fourteen.address
    assert allocator.malloc(11 * MIB).address == twelve.address
    assert allocator.malloc(11 * MIB).address == thirty.address


def test_among_equals_the_oldest_segment_is_taken_whatever_was_freed_last() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(12 * MIB) for _ in range(3)]
    for index in (1, 2, 0):
        allocator.free(blocks[index])
    assert [allocator.malloc(12 * MIB).address for _ in range(3)] == [block.address for block in blocks]


@pytest.mark.parametrize(("rest", "is_split"), [(MIB, False), (MIB + 512, True)])
def test_large_blocks_are_split_when_more_than_1_mib_is_left(rest: int, is_split: bool) -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(12 * MIB - rest)
    assert allocator.reserved == 12 * MIB
    assert block.size == (12 * MIB - rest if is_split else 12 * MIB)
    assert len(list(allocator.blocks())) == (2 if is_split else 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_freed_block_merges_with_free_neighbours(order: tuple[int, int, int]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (3, 4, 5)]
    for n_freed, index in enumerate(order, start=1):
        allocator.free(blocks[index])
        free = [block for block in allocator.blocks() if not block.allocated]
        assert all(a.address + a.size != b.address for a, b in pairwise(free))
        assert sum(block.size for block in free) == (8 + sum((3, 4, 5)[i] for i in order[:n_freed])) * MIB
    assert sizes(allocator) == [(20 * KIB, False)]
    assert allocator.stats().inactive_split == 0


# --- max_split_size_mb


@pytest.mark.parametrize(
    ("rounding", "segments", "asked", "size", "reserved"),
    [
        (20, (40 * MIB,), 39 * MIB, 40 * MIB, 80),  # below 40: neither takes nor splits the cached 40
        (20, (60 * MIB,), 40 * MIB + 512, 60 * MIB, 60),  # less than 20 MiB too large: 60 serves
        (20, (60 * MIB,), 40 * MIB, 40 * MIB, 100),
        (30, (60 * MIB,), 40 * MIB, 60 * MIB, 60),
        (20, (38 * MIB,), 30 * MIB, 30 * MIB, 38),  # below the limit blocks are split as usual
        # torch looks at the best fit only: 60 MiB is refused, the 70 MiB behind it are refused with it.
        (20, (60 * MIB, 70 * MIB), 12 * MIB, 12 * MIB, 142),
    ],
)
def test_which_oversize_blocks_serve_which_requests(rounding, segments, asked, size, reserved):
    settings = f"max_split_size_mb:40,max_non_split_rounding_mb:{rounding}"
    allocator = CachingAllocator(AllocatorConfig.parse(settings if rounding != 20 else "max_split_size_mb:40"))
    cached(allocator, *segments)
    assert allocator.malloc(asked).size == size
    assert allocator.reserved == reserved * MIB


# --- what is released


def held_segments(allocator: CachingAllocator) -> list[int]:
    return [segment.size // MIB for segment in allocator.segments()]


def test_emptying_the_cache_spares_segments_in_use() -> None:
    allocator = CachingAllocator()
    allocator.malloc(3 * MIB)
    allocator.malloc(4)
    cached(allocator, 18 * MIB, 30 * MIB)
    allocator.empty_cache()
    assert held_segments(allocator) == [20, 2]
    assert allocator.stats().inactive_split == 17 * MIB + 2 * MIB - 512


@pytest.mark.parametrize(
    ("capacity", "kept", "held", "retries"),
    [
        # The oversize block that is large enough, and no other: 90 is 20 MiB or more too large to be taken.
        (200, (50, 90, 20, 60), [50, 20, 60], 0),
        # From the largest until there is enough: 60, then 50, together more than 100.
        (200, (42, 60, 50, 20, 100), [42, 20, 100], 0),
        # Everything where oversize blocks are not enough.
        (200, (42, 60, 50, 20, 180), [180], 1),
        # release_available_cached_blocks looks in the request's own pool: a small one releases no oversize block.
        (100, (50, 50, 4 / MIB), [2], 1),
    ],
)
def test_what_a_request_releases_of_the_cache(capacity, kept, held, retries):
    allocator = CachingAllocator(AllocatorConfig.parse("max_split_size_mb:40"), capacity=capacity * MIB)
    *segments, asked = (int(mib * MIB) for mib in kept)
    cached(allocator, *segments)
    allocator.malloc(asked)
    assert held_segments(allocator) == held
    assert (allocator.alloc_retries, allocator.ooms) == (retries, 0)
