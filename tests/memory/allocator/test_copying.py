"""A copy goes on as the original does, and neither notices the other."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from lightning_memtools.memory.allocator import CachingAllocator, copy_of
from tests.memory.allocator.naive import MIB
from tests.memory.allocator.pair import CONFIGS, Pair, layout
from tests.memory.allocator.random_calls import random_call


@pytest.mark.parametrize("config", CONFIGS)
def test_a_copy_and_its_original_each_do_what_a_naive_allocator_does(config: str) -> None:
    pair = Pair.of(config, 220 * MIB)
    rng = random.Random(config)  # noqa: S311, test data
    for _ in range(300):
        random_call(pair, rng)
    ours = copy_of(pair.ours)
    at = {block.address: block for block in ours.blocks() if block.allocated}
    held = {number: at[block.address] for number, block in pair.held.items()}
    other = Pair(ours, deepcopy(pair.naive), held, pair.n_mallocs)
    before = layout(ours)
    for _ in range(150):
        random_call(other, rng)
        other.check()
    assert layout(other.ours) != before
    assert layout(pair.ours) == before
    for _ in range(150):
        random_call(pair, rng)
        pair.check()


def test_a_segment_of_many_blocks_is_no_deeper_than_one_of_few() -> None:
    allocator = CachingAllocator()
    for _ in range(4000):
        allocator.malloc(512)
    assert layout(copy_of(allocator)) == layout(allocator)


def test_an_observed_allocator_is_not_copied() -> None:
    allocator = CachingAllocator(observer=lambda *_: None)
    with pytest.raises(ValueError, match="the copy would call them"):
        copy_of(allocator)
