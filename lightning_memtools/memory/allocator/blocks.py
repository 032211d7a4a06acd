"""Blocks of simulated device memory, the segments they tile, and the cache of free blocks.

`BlockCache` says which free block serves a request, how that is split, and how free blocks merge. The functions of
c10/cuda/CUDACachingAllocator.cpp whose rules these are: get_pool, get_free_block, should_split, alloc_found_block,
free_block and try_merge_blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import SMALL_LIMIT
from lightning_memtools.memory.allocator.tally import Tally

FREE = 0  # cached: in its set of free blocks. The only state that is false, which the hot paths test for
ALLOCATED = 1
UNMAPPED = 2  # a range of an expandable segment with no memory behind it

# A free block is found by size and, among equals, by the age of its segment and then its address (in torch since
# pull request 183591; before, by address alone). Simulated segments get rising addresses that are not reused, so here
# address order is age order. One integer holds the whole key: a sorted list of integers and `bisect` do the search.
ADDRESS_BITS = 64
# Larger than any request: without max_split_size every comparison with it says that a block may be split.
_NO_LIMIT = 1 << 62


class Block:
    """A range of simulated device memory: allocated by `CachingAllocator.malloc`, free in the cache, or unmapped.

    Do not use a block after it was freed: the allocator may then merge it with its neighbors or allocate it again.

    Attributes:
        address: Its first address.
        size: Its size in bytes, as rounded up by the allocator.
        requested: The size in bytes that was requested at its last allocation.
        id: The number of its last allocation, counted from 1. Traces refer to blocks by this number.
        label: The label of its last allocation.
        free_blocks: The set that the block belongs to when it is free.
        segment: The segment it is part of.
        prev: The block before it in the segment.
        next: The block after it in the segment.
    """

    __slots__ = (
        "address",
        "free_blocks",
        "id",
        "label",
        "next",
        "prev",
        "requested",
        "segment",
        "size",
        "state",
    )

    def __init__(self, address: int, size: int, free_blocks: FreeBlocks, segment: Segment) -> None:
        self.address = address
        self.size = size
        self.free_blocks = free_blocks
        self.segment = segment
        self.state = FREE
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.id = 0
        self.label: str | None = None

    @property
    def allocated(self) -> bool:
        """True while the block is in use."""
        return self.state == ALLOCATED

    @property
    def is_split(self) -> bool:
        """True if it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def is_expandable(self) -> bool:
        """True if it is part of an expandable segment."""
        return self.segment.page_size is not None

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes, and return the rest as a new block after this one."""
        rest = Block(self.address + size, self.size - size, self.free_blocks, self.segment)
        rest.prev = self
        rest.next = after = self.next
        if after is not None:
            after.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self, after: Block) -> None:
        """Merge the next block in the segment, `after`, into this one."""
        self.size += after.size
        self.next = beyond = after.next
        if beyond is not None:
            beyond.prev = self

    def __repr__(self) -> str:
        state = ("free", "allocated", "unmapped")[self.state]
        return f"Block(address={self.address:#x}, size={self.size}, requested={self.requested}, {state})"


class Segment:
    """Memory from one cudaMalloc. An expandable segment is a range of virtual addresses instead, mapped in parts.

    Attributes:
        address: Its first address.
        size: Its size in bytes; for an expandable segment, the size of the virtual range, mapped or not.
        free_blocks: The set that its blocks belong to when they are free.
        page_size: The number of bytes that are mapped at a time; None for segments that are not expandable.
        first: The block at its start. It never changes, because a merge keeps the block at the lower address.
    """

    __slots__ = ("address", "first", "free_blocks", "page_size", "size")

    def __init__(self, address: int, size: int, free_blocks: FreeBlocks, page_size: int | None = None) -> None:
        self.address = address
        self.size = size
        self.free_blocks = free_blocks
        self.page_size = page_size
        self.first = Block(address, size, free_blocks, self)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks in address order, including the unmapped parts of an expandable segment."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next


class FreeBlocks:
    """The free blocks of one stream and one size class (small or large), sorted for the best-fit search.

    Attributes:
        stream: The stream whose requests it serves.
        is_small: Whether it serves requests of at most 1 MiB.
        keys: One integer per free block, made of its size and address (see `ADDRESS_BITS`), in ascending order.
        blocks: The free blocks, in the order of `keys`.
        unmapped: Ranges of expandable segments without memory behind them, in address order.
    """

    __slots__ = ("blocks", "is_small", "keys", "stream", "unmapped")

    def __init__(self, *, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Add a block, so that the search finds it."""
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)
        block.state = FREE

    def remove(self, block: Block) -> None:
        """Remove a block, which must have the size and address that it was added with."""
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index]
        del self.blocks[index]


class BlockCache:
    """All free blocks, by stream."""

    __slots__ = ("_expandable", "_max_split", "_plain", "_pools", "_rounding", "_tally")

    def __init__(self, config: AllocatorConfig, tally: Tally) -> None:
        self._tally = tally
        self._max_split = _NO_LIMIT if config.max_split_size is None else config.max_split_size
        self._rounding = config.max_non_split_rounding or config.large_segment_size
        self._expandable = config.expandable_segments
        self._pools: dict[tuple[int, bool], FreeBlocks] = {}
        # With the default settings the smallest block that is large enough is always taken.
        self._plain = not config.expandable_segments and config.max_split_size is None

    def pool(self, stream: int, *, is_small: bool) -> FreeBlocks:
        """Return a stream's set of free blocks for small requests, or its set for large ones."""
        free_blocks = self._pools.get((stream, is_small))
        if free_blocks is None:
            free_blocks = self._pools[stream, is_small] = FreeBlocks(stream=stream, is_small=is_small)
        return free_blocks

    def pools(self) -> list[FreeBlocks]:
        """Return all sets of free blocks in the order that `empty_cache` follows: those of large blocks first."""
        return [self._pools[key] for key in sorted(self._pools, key=lambda key: (key[1], key[0]))]

    def take(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Remove and return the free block that fits ``size`` bytes best; None when there is none."""
        keys = free_blocks.keys
        index = bisect_left(keys, size << ADDRESS_BITS)
        if not self._plain:
            index = self._refine(free_blocks, size, index)
        if index == len(keys):
            return None
        del keys[index]
        return free_blocks.blocks.pop(index)

    def cut(self, block: Block, size: int) -> None:
        """Cut a block to ``size`` bytes if the allocator would split it, and put the rest back into the cache."""
        free_blocks = block.free_blocks
        rest = block.size - size
        was_split = block.prev is not None or block.next is not None
        is_worth = free_blocks.is_small or self._expandable or (rest > SMALL_LIMIT and size < self._max_split)
        if rest and is_worth:
            free_blocks.add(block.cut(size))
            self._count_split(-size if was_split else rest)
        elif was_split:
            self._count_split(-block.size)

    def put_back(self, block: Block) -> None:
        """Merge a block that is no longer used with its free neighbors, and put the result into the cache."""
        free_blocks = block.free_blocks
        block.state = FREE
        split = 0
        before = block.prev
        if before is not None and before.state == FREE:
            free_blocks.remove(before)
            split -= before.size
            before.absorb(block)
            block = before
        after = block.next
        if after is not None and after.state == FREE:
            free_blocks.remove(after)
            split -= after.size
            block.absorb(after)
        free_blocks.add(block)
        if block.prev is not None or block.next is not None:
            split += block.size
        self._count_split(split)

    def _refine(self, free_blocks: FreeBlocks, size: int, index: int) -> int:
        """Return the index of the block to use, given the best fit's `index`; ``len(blocks)`` if no block is usable."""
        blocks = free_blocks.blocks
        none = len(blocks)
        if index == none:
            return none
        if self._expandable:
            # A block counts with the unmapped range behind it: the growing end of a segment is taken last.
            while index + 1 < none and _size_to_grow_to(blocks[index + 1]) < _size_to_grow_to(blocks[index]):
                index += 1
        found = blocks[index].size
        if size < self._max_split <= found:
            return none
        if size >= self._max_split and found >= size + self._rounding:
            return none
        return index

    def _count_split(self, size: int) -> None:
        # As torch does: free pages of expandable segments can always be given back, so nothing there counts as split.
        if not self._expandable:
            self._tally.split += size


def _size_to_grow_to(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
