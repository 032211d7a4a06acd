"""The books: categories add up, deaths are settled wherever they happen."""

from __future__ import annotations

import gc
import random

import torch

from lightning_memtools.memory.allocator import CachingAllocator
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import VirtualLedger


def storage(n_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(n_bytes)


def sizes_of(ledger: VirtualLedger) -> list[int]:
    """The bytes of the live entries by category."""
    entries = ledger.entries()
    return [sum(entry.block.size for entry in entries if entry.category is category) for category in Category]


def test_random_history_keeps_sums_and_the_peaks_composition():
    rng = random.Random(0)  # noqa: S311, no secret
    ledger = VirtualLedger(CachingAllocator())
    live: list[torch.UntypedStorage] = []
    categories: dict[int, Category] = {}
    peak, at_peak = 0, [0] * len(Category)
    for _ in range(3000):
        action = rng.random()
        if action < 0.5 or not live:
            made = storage(rng.randrange(1, 5000))
            category = rng.choice(list(Category))
            ledger.add(made, category, "m")
            live.append(made)
            categories[made._cdata] = category
            del made
        elif action < 0.8:
            gone = live.pop(rng.randrange(len(live)))
            del categories[gone._cdata]
            del gone
        elif action < 0.9:
            entry = ledger.find(rng.choice(live)._cdata)
            sizes = sizes_of(ledger)
            ledger.resize(entry, rng.randrange(1, 5000))
            # Both blocks are held for a moment.
            sizes[entry.category] += entry.block.size
            if sum(sizes) > peak:
                peak, at_peak = sum(sizes), sizes
        else:
            ledger.reset_peaks()
            peak = 0
        sizes = [0] * len(Category)
        for one in live:
            entry = ledger.find(one._cdata)
            sizes[categories[one._cdata]] += entry.block.size
        assert sizes_of(ledger) == sizes
        assert sum(sizes) == ledger.allocator.allocated
        if sum(sizes) > peak:
            peak, at_peak = sum(sizes), sizes
        assert ledger.allocator.peak_allocated == peak
        assert ledger.bytes_at_peak() == at_peak


def test_storages_that_die_in_a_garbage_collection_inside_the_ledger_are_settled() -> None:
    ledger = VirtualLedger(CachingAllocator())

    class Cycle:
        def __init__(self) -> None:
            self.storage = storage(1000)
            self.itself = self

    threshold = gc.get_threshold()
    gc.set_threshold(1)  # A collection at nearly every new object, so inside malloc as well.
    try:
        for _ in range(300):
            ledger.add(Cycle().storage, Category.OTHER, "m")
        kept = storage(1000)
        ledger.add(kept, Category.OTHER, "m")
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert sizes_of(ledger) == [0] * 6 + [1024]
    assert ledger.allocator.allocated == 1024
    assert len(ledger.entries()) == 1
