"""Blocks of device memory, and the sets in which free ones wait for their next use."""

from __future__ import annotations

from bisect import bisect_left

# A free block is found by size first and, among equals, by address: both in one integer, so that a sorted list of plain
# integers and `bisect` do the search. Simulated addresses only ever grow, and stay below 2**53.
ADDRESS_BITS = 53


class Block:
    """A range of simulated device memory: what `CachingAllocator.malloc` gives out, and what it keeps when it is free.

    The object is the allocator's own: once freed it may be merged away or be given out again, as with a pointer.

    Attributes:
        address: Where it starts. Addresses are simulated and never reused.
        size: Its size in bytes, rounded as the allocator rounds.
        requested: What the holder asked for, in bytes.
        allocated: Whether somebody holds it.
        stream: The stream it was allocated for.
        id: The number of the allocation (counted from 1), which names it in traces.
        label: What the holder calls it.
    """

    __slots__ = (
        "address",
        "age_base",
        "allocated",
        "free_blocks",
        "id",
        "label",
        "mapped",
        "next",
        "prev",
        "requested",
        "segment",
        "size",
        "stream_uses",
    )

    def __init__(self, address: int, size: int, free_blocks: FreeBlocks, segment: Segment) -> None:
        self.address = address
        self.size = size
        self.free_blocks = free_blocks
        self.segment = segment
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.stream_uses: set[int] | None = None
        self.age_base = 0
        self.id = 0
        self.label: str | None = None

    @property
    def stream(self) -> int:
        """The stream it was allocated for."""
        return self.free_blocks.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "free"
        return f"Block(address={self.address:#x}, size={self.size}, requested={self.requested}, {state})"


class Segment:
    """What one request to the device gave: a range of addresses, tiled by blocks.

    Attributes:
        address: Where it starts.
        size: Its size in bytes; for an expandable segment the whole virtual range.
        first: The block at its start.
    """

    __slots__ = ("address", "first", "free_blocks", "is_expandable", "size")

    def __init__(self, address: int, size: int, free_blocks: FreeBlocks) -> None:
        self.address = address
        self.size = size
        self.free_blocks = free_blocks
        self.is_expandable = False
        self.first = Block(address, size, free_blocks, self)


class FreeBlocks:
    """The free blocks of one stream in one pool, small or large, from the best fit on.

    Attributes:
        is_small: Whether it serves requests of at most 1 MiB.
        pool: The private pool's number; 0 is the default pool.
    """

    __slots__ = ("blocks", "is_small", "keys", "pool", "stream", "tally")

    def __init__(self, *, stream: int, pool: int, is_small: bool, tally: object) -> None:
        self.stream = stream
        self.pool = pool
        self.is_small = is_small
        self.tally = tally
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def add(self, block: Block) -> None:
        """Put a block where the search will find it."""
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Take a block out; it must be in."""
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index]
        del self.blocks[index]

    def first_of_at_least(self, size: int) -> int:
        """The index of the smallest block that holds ``size`` bytes, at the lowest address among equals."""
        return bisect_left(self.keys, size << ADDRESS_BITS)
