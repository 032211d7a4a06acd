"""Random calls of an allocator."""

from __future__ import annotations

import random

from tests.memory.allocator.naive import MIB
from tests.memory.allocator.pair import Pair


def random_size(rng: random.Random) -> int:
    """All orders of magnitude, and a few sizes again and again, so that equal blocks compete."""
    return rng.choice([4, 700, 512 * 1024, 1024 * 1024, 3 * MIB, 12 * MIB, int(2 ** rng.uniform(0, 26.3))])


def random_call(pair: Pair, rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.5 or not pair.held:
        has_memory = pair.malloc(random_size(rng), stream=rng.choice([0, 0, 0, 7]), pool=rng.choice([0, 0, 0, 3]))
        if not has_memory:
            for number in rng.sample(sorted(pair.held), len(pair.held) // 2):
                pair.free(number)
    elif choice < 0.9:
        number = rng.choice(sorted(pair.held))
        if rng.random() < 0.15:
            pair.record_stream(number, rng.choice([7, 9]))
        pair.free(number)
    elif choice < 0.94:
        pair.synchronize(rng.choice([7, 9, None]))
    else:
        rng.choice(
            [
                pair.empty_cache,
                lambda: pair.release_pool(3),
                lambda: pair.set_used_by_others(rng.choice([0, 20 * MIB])),
            ]
        )()
