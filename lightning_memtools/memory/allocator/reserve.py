"""What the allocator holds of the simulated device: segments taken and given back, and what the device has left."""

from __future__ import annotations

from collections.abc import Callable

from lightning_memtools.memory.allocator.blocks import Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.rounding import SEGMENT_STEP, round_up
from lightning_memtools.memory.allocator.tally import Count, Tally

# Where the simulated addresses begin: anything but zero, which a reader could take for a null pointer.
_FIRST_ADDRESS = 1 << 40

Observer = Callable[[str, int, int, FreeBlocks, str | None], None]
"""Told of each action: torch's name for it, an address, a size in bytes, the stream's pool, and the block's label."""


class Reserve:
    """The segments held of a device; all sizes in bytes.

    Attributes:
        capacity: What the device has in all; None for no limit.
        used_by_others: Held by other processes, and by this one outside the allocator (the CUDA context).
        allowed: The most that may be reserved (``per_process_memory_fraction``); None for no such limit.
        large_segment_size: The page size of large expandable segments.
        segments: Every segment held, by address.
        whole: Counts over all pools.
        device_allocs: How often memory was asked of the device, and given.
        device_frees: How often memory went back.
        oversize: Segments of at least ``max_split_size``.
        observer: Told of every segment taken and given back, and of every page mapped and unmapped.
    """

    def __init__(
        self,
        config: AllocatorConfig,
        capacity: int | None,
        used_by_others: int,
        whole: Tally,
        observer: Observer | None,
    ) -> None:
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.large_segment_size = config.large_segment_size
        self.whole = whole
        self.segments: dict[int, Segment] = {}
        self.device_allocs = 0
        self.device_frees = 0
        self.oversize = Count()
        self.observer = observer
        fraction = config.per_process_memory_fraction
        self.allowed = None if capacity is None or fraction >= 1 else int(fraction * capacity)
        self._max_split = config.max_split_size
        self._next_address = _FIRST_ADDRESS
        self._spare_ranges: dict[int, int] = {}

    @property
    def device_free(self) -> int | None:
        """What the device has left; None when it has no limit."""
        if self.capacity is None:
            return None
        return self.capacity - self.used_by_others - self.whole.reserved

    def device_has(self, n_bytes: int) -> bool:
        """Whether the device can give so much more."""
        return self.capacity is None or self.used_by_others + self.whole.reserved + n_bytes <= self.capacity

    def within_allowance(self, n_bytes: int) -> bool:
        """Whether the memory fraction lets the allocator ask for so much more."""
        return self.allowed is None or self.whole.reserved + n_bytes <= self.allowed

    def take_segment(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Ask the device for a segment (cudaMalloc). One block covers it; None when the device has too little."""
        if not self.device_has(size):
            return None
        segment = Segment(self._new_addresses(size), size, free_blocks)
        self.segments[segment.address] = segment
        if self._max_split is not None and size >= self._max_split:
            self.oversize.add()
        self.count_taken("segment_alloc", segment.address, size, free_blocks)
        return segment.first

    def give_back_segment(self, block: Block) -> None:
        """Give the segment of its only block, which is free, back to the device (cudaFree)."""
        block.free_blocks.remove(block)
        del self.segments[block.segment.address]
        if self._max_split is not None and block.size >= self._max_split:
            self.oversize.remove()
        self.count_given_back("segment_free", block.address, block.size, block.free_blocks)

    def take_range(self, free_blocks: FreeBlocks, size: int, page_size: int) -> Segment:
        """Begin an expandable segment: a range of addresses with no memory behind it yet."""
        spares = [address for address, spare_size in self._spare_ranges.items() if spare_size == size]
        address = min(spares, default=None)
        if address is None:
            address = self._new_addresses(size)
        else:
            del self._spare_ranges[address]
        segment = Segment(address, size, free_blocks, page_size)
        self.segments[segment.address] = segment
        return segment

    def give_up_range(self, segment: Segment) -> None:
        """End an expandable segment that has no memory behind it any more."""
        del self.segments[segment.address]
        # Ranges are as large as the device: were their addresses not reused, a long run could use them up.
        self._spare_ranges[segment.address] = segment.size

    def count_taken(self, action: str, address: int, size: int, free_blocks: FreeBlocks) -> None:
        """Count memory that the device gave, and tell the observer."""
        segments = 1 if action == "segment_alloc" else 0
        self.device_allocs += 1
        for held in (free_blocks.tally, self.whole):
            held.add_reserved(segments, size)
        if self.observer is not None:
            self.observer(action, address, size, free_blocks, None)

    def count_given_back(self, action: str, address: int, size: int, free_blocks: FreeBlocks) -> None:
        """Count memory that went back to the device, and tell the observer."""
        segments = 1 if action == "segment_free" else 0
        self.device_frees += 1
        for held in (free_blocks.tally, self.whole):
            held.remove_reserved(segments, size)
        if self.observer is not None:
            self.observer(action, address, size, free_blocks, None)

    def _new_addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += round_up(size, SEGMENT_STEP)
        return address
