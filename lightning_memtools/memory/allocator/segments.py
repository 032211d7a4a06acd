"""The segments that the allocator holds of the simulated device: how they are allocated, extended and released.

An expandable segment is one range of addresses per stream, small or large, with memory mapped behind it page by page.
Where its rules stand in c10/cuda/CUDACachingAllocator.cpp: find_expandable_block, try_allocate_expandable_block,
map_block, unmap_block and release_expandable_segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import SEGMENT_STEP, SMALL_SEGMENT, round_up
from lightning_memtools.memory.allocator.blocks import ADDRESS_BITS, FREE, UNMAPPED, Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.tally import Tally
from lightning_memtools.memory.sizes import GIB

# The first simulated address: not zero, which a reader could take for a null pointer.
_FIRST_ADDRESS = 1 << 40
# The range of an expandable segment when the device has no limit.
_UNLIMITED_RANGE = 1024 * GIB

Observer = Callable[[str, int, int, FreeBlocks, str | None], None]
"""Takes each action: torch's name for it, an address, a size in bytes, the stream's pool, and the block's label."""


class DeviceSegments:
    """Holds the segments that are reserved from a device. All sizes are in bytes.

    Attributes:
        capacity: The total memory of the device; None for no limit.
        used_by_others: The memory held by other processes, and by this process outside the allocator (CUDA context).
        allowed: The most that may be reserved (``per_process_memory_fraction``); None for no such limit.
        large_segment_size: The page size of large expandable segments.
        segments: Every segment held, by address.
        tally: Counts the memory that is held.
        observer: Called for every segment that is reserved or released, and for every page that is mapped or unmapped.
    """

    def __init__(
        self,
        config: AllocatorConfig,
        capacity: int | None,
        used_by_others: int,
        tally: Tally,
        observer: Observer | None,
    ) -> None:
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.large_segment_size = config.large_segment_size
        self.tally = tally
        self.segments: dict[int, Segment] = {}
        self.observer = observer
        fraction = config.per_process_memory_fraction
        self.allowed = None if capacity is None or fraction >= 1 else int(fraction * capacity)
        self._next_address = _FIRST_ADDRESS

    @property
    def device_free(self) -> int | None:
        """The free memory of the device; None when it has no limit."""
        if self.capacity is None:
            return None
        return self.capacity - self.used_by_others - self.tally.reserved

    def device_has(self, n_bytes: int) -> bool:
        """Return whether the device has room for this many more bytes."""
        return self.capacity is None or self.used_by_others + self.tally.reserved + n_bytes <= self.capacity

    def within_allowance(self, n_bytes: int) -> bool:
        """Return whether the memory fraction lets the allocator reserve this many more bytes."""
        return self.allowed is None or self.tally.reserved + n_bytes <= self.allowed

    def take_segment(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Reserve a segment (cudaMalloc), and return its only block; None when the device has too little memory."""
        if not self.device_has(size):
            return None
        segment = self.new_segment(free_blocks, size)
        self.count("segment_alloc", segment.address, size, free_blocks)
        return segment.first

    def give_back_segment(self, block: Block) -> None:
        """Release a segment (cudaFree), given the free block that covers all of it."""
        block.free_blocks.remove(block)
        del self.segments[block.segment.address]
        self.count("segment_free", block.address, block.size, block.free_blocks)

    def count(self, action: str, address: int, size: int, free_blocks: FreeBlocks) -> None:
        """Count memory that was reserved or released, depending on `action`, and call the observer."""
        self.tally.reserve(size if action in {"segment_alloc", "segment_map"} else -size)
        if self.observer is not None:
            self.observer(action, address, size, free_blocks, None)

    def new_segment(self, free_blocks: FreeBlocks, size: int, page_size: int | None = None) -> Segment:
        """Return a segment at an unused address. With a `page_size`, the segment is expandable, and still unmapped."""
        segment = Segment(self._next_address, size, free_blocks, page_size)
        self._next_address += round_up(size, SEGMENT_STEP)
        self.segments[segment.address] = segment
        return segment


# --- expandable segments


def grow(reserve: DeviceSegments, free_blocks: FreeBlocks, size: int) -> Block | None:
    """Map pages of expandable segments at the lowest possible address, to make a block of at least ``size`` bytes.

    Returns:
        The new block, removed from `free_blocks`; None when the device has too little memory. In that case, pages
        that were mapped already stay in the cache.
    """
    block = _lowest_room(free_blocks, size) or _new_range(reserve, free_blocks)
    if block.state == UNMAPPED:
        mapped = map_pages(reserve, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        # A free block merges with all free blocks behind it, so an unmapped range follows.
        behind = block.next
        assert behind is not None
        mapped = map_pages(reserve, behind, min(size - block.size, behind.size))
        if mapped is None:
            return None
        block = mapped
    free_blocks.remove(block)
    return block


def map_pages(reserve: DeviceSegments, block: Block, size: int) -> Block | None:
    """Map memory for the first ``size`` bytes of an unmapped range, rounded up to whole pages.

    Returns:
        The free block that now holds these bytes, merged with its free neighbors; None when the device has too little
        memory, in which case nothing changes.
    """
    free_blocks = block.free_blocks
    page = block.segment.page_size
    assert page is not None
    size = round_up(size, page)
    if not reserve.device_has(size):
        return None
    free_blocks.unmapped.remove(block)
    if size < block.size:
        _add_unmapped(free_blocks, block.cut(size))
    reserve.count("segment_map", block.address, size, free_blocks)
    before, after = block.prev, block.next
    if before is not None and before.state == FREE:
        free_blocks.remove(before)
        before.absorb(block)
        block = before
    if after is not None and after.state == FREE:
        free_blocks.remove(after)
        block.absorb(after)
    free_blocks.add(block)
    return block


def unmap_pages(reserve: DeviceSegments, block: Block) -> None:
    """Release the whole pages within a free block; a segment that has no page left is deleted."""
    free_blocks, segment = block.free_blocks, block.segment
    start, size = whole_pages(block)
    if size == 0:
        return
    free_blocks.remove(block)
    if start > block.address:
        front, block = block, block.cut(start - block.address)
        free_blocks.add(front)
    if size < block.size:
        free_blocks.add(block.cut(size))
    before, after = block.prev, block.next
    if before is not None and before.state == UNMAPPED:
        free_blocks.unmapped.remove(before)
        before.absorb(block)
        block = before
    if after is not None and after.state == UNMAPPED:
        free_blocks.unmapped.remove(after)
        block.absorb(after)
    _add_unmapped(free_blocks, block)
    reserve.count("segment_unmap", start, size, free_blocks)
    if not block.is_split:
        free_blocks.unmapped.remove(block)
        del reserve.segments[segment.address]


def whole_pages(block: Block) -> tuple[int, int]:
    """Return the address of the first page that lies wholly within a block, and the size of all such pages in bytes."""
    segment = block.segment
    page = segment.page_size
    assert page is not None
    offset = block.address - segment.address
    start = round_up(offset, page)
    end = (offset + block.size) // page * page
    return segment.address + start, max(end - start, 0)


def _lowest_room(free_blocks: FreeBlocks, size: int) -> Block | None:
    """Return the lowest block that spans ``size`` bytes together with the free or unmapped blocks right behind it."""
    for unmapped in free_blocks.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.state == FREE else unmapped
        room = 0
        block: Block | None = first
        while block is not None and block.state in {FREE, UNMAPPED} and room < size:
            room += block.size
            block = block.next
        if room >= size:
            return first
    return None


def _new_range(reserve: DeviceSegments, free_blocks: FreeBlocks) -> Block:
    page = SMALL_SEGMENT if free_blocks.is_small else reserve.large_segment_size
    # 1 1/8 of the device, so that a block can grow at the end while released pages before it are unused.
    total = _UNLIMITED_RANGE if reserve.capacity is None else reserve.capacity + reserve.capacity // 8
    segment = reserve.new_segment(free_blocks, round_up(total, page), page)
    _add_unmapped(free_blocks, segment.first)
    return segment.first


def _add_unmapped(free_blocks: FreeBlocks, block: Block) -> None:
    block.state = UNMAPPED
    insort(free_blocks.unmapped, block, key=attrgetter("address"))


# --- releasing cached segments


def release_cached(reserve: DeviceSegments, pools: Iterable[FreeBlocks]) -> None:
    """Release every segment that has no used block, and all free pages of expandable segments."""
    for free_blocks in pools:
        for block in list(free_blocks.blocks):  # a copy: releasing changes the list
            if block.is_expandable:
                unmap_pages(reserve, block)
            elif not block.is_split:
                reserve.give_back_segment(block)


def release_oversize(reserve: DeviceSegments, free_blocks: FreeBlocks, size: int, max_split: int) -> bool:
    """Release cached blocks of at least `max_split` bytes each, to make room for a request of `size` bytes.

    If a single block is large enough, only that block is released. Otherwise, the largest blocks are released first.

    Returns:
        True if enough memory for the request was released.
    """
    wanted = max(size, max_split)
    blocks = free_blocks.blocks
    index = bisect_left(free_blocks.keys, wanted << ADDRESS_BITS)
    if index < len(blocks) and not blocks[index].is_expandable:
        # A block of at least max_split_size is never split, so it is a whole segment.
        reserve.give_back_segment(blocks[index])
        return True
    released = 0
    for block in reversed(blocks[:index]):
        if released >= wanted or block.size < max_split:
            break
        if not block.is_expandable:
            released += block.size
            reserve.give_back_segment(block)
    return released >= wanted
