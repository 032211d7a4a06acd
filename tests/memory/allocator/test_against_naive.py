"""Call for call, the allocator does what a naive one does: same addresses, same blocks, same statistics."""

from __future__ import annotations

import random

import pytest

from tests.memory.allocator.naive import MIB
from tests.memory.allocator.pair import CONFIGS, Pair
from tests.memory.allocator.random_calls import random_call


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("capacity", [None, 220 * MIB])
def test_random_calls_have_the_same_outcome(config: str, capacity: int | None) -> None:
    pair = Pair.of(config, capacity)
    rng = random.Random(f"{config} {capacity}")  # noqa: S311, test data
    for _ in range(1500):
        random_call(pair, rng)
        pair.check()
    if capacity is not None:
        # The calls led through the whole miss sequence: retries that helped, and some that did not.
        assert pair.ours.alloc_retries > pair.ours.ooms > 0
