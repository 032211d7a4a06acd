"""Blocks of simulated device memory, the segments they tile, and the sets of those that are free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lightning_memtools.memory.allocator.tally import Tally

FREE = 0  # cached: in its set of free blocks. The only false state, which the hot paths test for
ALLOCATED = 1
WAITING = 2  # freed, but another stream may still be using it
UNMAPPED = 3  # a range of an expandable segment with no memory behind it

# A free block is found by size and, among equals, by the age of its segment and then its address (in torch since
# pull request 183591; before, by address alone). Simulated segments get rising addresses that are not reused, so here
# address order is age order. One integer holds the whole key: a sorted list of integers and `bisect` do the search.
ADDRESS_BITS = 64


class Block:
    """A range of simulated device memory: what `CachingAllocator.malloc` gives out, and what it keeps when it is free.

    The object is the allocator's own: once freed it may be merged away or be given out again, as with a pointer.

    Attributes:
        address: Where it starts.
        size: Its size in bytes, rounded as the allocator rounds.
        requested: What its last holder asked for, in bytes.
        id: The number of its last allocation, counted from 1: its name in traces.
        label: What its last holder calls it.
        free_blocks: The set it belongs to when it is free.
        segment: The segment it is part of.
        prev: The block before it in the segment.
        next: The block after it in the segment.
        stream_uses: The other streams it was used on while allocated, or that it waits for.
        age_base: How many lookups the pool had seen when it was freed (kept only for garbage collection).
    """

    __slots__ = (
        "address",
        "age_base",
        "free_blocks",
        "id",
        "label",
        "next",
        "prev",
        "requested",
        "segment",
        "size",
        "state",
        "stream_uses",
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
        self.stream_uses: set[int] | None = None
        self.age_base = 0

    @property
    def allocated(self) -> bool:
        """Whether somebody holds it."""
        return self.state == ALLOCATED

    @property
    def stream(self) -> int:
        """The stream it was allocated for."""
        return self.free_blocks.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def is_expandable(self) -> bool:
        """Whether it is part of an expandable segment."""
        return self.segment.page_size is not None

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes; the rest becomes a new block after this one, which is returned."""
        rest = Block(self.address + size, self.size - size, self.free_blocks, self.segment)
        rest.prev = self
        rest.next = after = self.next
        if after is not None:
            after.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self, after: Block) -> None:
        """Take over the block behind this one."""
        self.size += after.size
        self.next = beyond = after.next
        if beyond is not None:
            beyond.prev = self

    def __repr__(self) -> str:
        state = ("free", "allocated", "waiting for another stream", "unmapped")[self.state]
        return f"Block(address={self.address:#x}, size={self.size}, requested={self.requested}, {state})"


class Segment:
    """What one request to the device gave, or for expandable segments one range of virtual addresses.

    Attributes:
        address: Where it starts.
        size: Its size in bytes; for an expandable segment that of the virtual range, mapped or not.
        free_blocks: Where its blocks go when they are free.
        page_size: For an expandable segment: how much is mapped at a time. None otherwise.
        first: The block at its start: of two blocks that merge the lower one stays, so it never changes.
    """

    __slots__ = ("address", "first", "free_blocks", "page_size", "size")

    def __init__(self, address: int, size: int, free_blocks: FreeBlocks, page_size: int | None = None) -> None:
        self.address = address
        self.size = size
        self.free_blocks = free_blocks
        self.page_size = page_size
        self.first = Block(address, size, free_blocks, self)

    def blocks(self) -> Iterator[Block]:
        """Its blocks by address, without gaps; parts of an expandable segment that are not mapped are among them."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    @property
    def mapped(self) -> int:
        """How much device memory is behind it, in bytes."""
        return sum(block.size for block in self.blocks() if block.state != UNMAPPED)


class FreeBlocks:
    """The free blocks of one stream in one pool, small or large, in the order of the best-fit search.

    Attributes:
        stream: The stream whose requests it serves.
        pool: The private pool's number; 0 is the default pool.
        is_small: Whether it serves requests of at most 1 MiB.
        tally: Counts what the small, or the large, pools hold.
        keys: One integer per free block, sorted: see `ADDRESS_BITS`.
        blocks: The free blocks, each at its key's index.
        unmapped: Ranges of expandable segments without memory behind them, by address.
    """

    __slots__ = ("blocks", "is_small", "keys", "pool", "stream", "tally", "unmapped")

    def __init__(self, *, stream: int, pool: int, is_small: bool, tally: Tally) -> None:
        self.stream = stream
        self.pool = pool
        self.is_small = is_small
        self.tally = tally
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Put a block where the search will find it."""
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)
        block.state = FREE

    def remove(self, block: Block) -> None:
        """Take a block out; it must be in, with the size and address it was added with."""
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index]
        del self.blocks[index]

    def first_of_at_least(self, size: int) -> int:
        """The index of the smallest block that holds ``size`` bytes, the oldest among equals."""
        return bisect_left(self.keys, size << ADDRESS_BITS)
