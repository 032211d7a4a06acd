"""A copy goes on as the original does, and neither notices the other."""

from __future__ import annotations

import random

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator, SimulatedOutOfMemory, copy_of

MIB = 2**20


def layout(allocator: CachingAllocator) -> list[tuple[int, int, int]]:
    return [(block.address, block.size, block.state) for block in allocator.blocks()]


def work(allocator: CachingAllocator, seed: int) -> list[object]:
    """Allocate and free at random, and return what happened and what is there afterwards."""
    draw = random.Random(seed)  # noqa: S311, test data
    held: list[Block] = [block for block in allocator.blocks() if block.allocated]
    happened: list[object] = []
    for _ in range(300):
        if held and draw.random() < 0.45:
            allocator.free(held.pop(draw.randrange(len(held))))
            continue
        try:
            held.append(allocator.malloc(draw.choice([4, 700, MIB, 3 * MIB, 12 * MIB, draw.randint(1, 40 * MIB)])))
            happened.append(held[-1].address)
        except SimulatedOutOfMemory as error:
            happened.append(str(error))
            allocator.empty_cache()
    return [*happened, layout(allocator), allocator.stats()]


@pytest.mark.parametrize("config", ["", "expandable_segments:True", "max_split_size_mb:32"])
def test_a_copy_does_what_its_original_does_and_neither_notices_the_other(config: str) -> None:
    allocator = CachingAllocator(AllocatorConfig.parse(config), capacity=220 * MIB)
    work(allocator, seed=0)
    copy, before = copy_of(allocator), layout(allocator)
    done_by_copy = work(copy, seed=1)
    assert layout(copy) != before
    assert layout(allocator) == before
    assert work(allocator, seed=1) == done_by_copy


def test_a_segment_of_many_blocks_is_no_deeper_than_one_of_few() -> None:
    allocator = CachingAllocator()
    for _ in range(4000):
        allocator.malloc(512)
    assert layout(copy_of(allocator)) == layout(allocator)


def test_an_observed_allocator_is_not_copied() -> None:
    allocator = CachingAllocator(observer=lambda *_: None)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_of(allocator)
