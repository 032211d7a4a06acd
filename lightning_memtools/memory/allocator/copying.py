"""A second allocator in the state of a first: what follows can be tried on it, again and again."""

from __future__ import annotations

from copy import deepcopy

from lightning_memtools.memory.allocator.blocks import Block
from lightning_memtools.memory.allocator.caching import CachingAllocator


def copy_of(allocator: CachingAllocator) -> CachingAllocator:
    """An allocator with the same blocks, cache and counts, which shares nothing with the first.

    Raises:
        ValueError: The allocator is observed or has callbacks, which a copy would call too.
    """
    if allocator.is_observed or allocator.free_memory_callbacks:
        raise ValueError("An allocator that is observed or has callbacks cannot be copied: the copy would call them.")
    # The blocks of a segment are a chain, which deepcopy would follow block within block until Python's stack is full.
    known: dict[int, object] = {id(block): object.__new__(Block) for block in allocator.blocks()}
    for block in allocator.blocks():
        for name in Block.__slots__:
            setattr(known[id(block)], name, deepcopy(getattr(block, name), known))
    return deepcopy(allocator, known)
