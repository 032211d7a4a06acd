"""A simulation of PyTorch's CUDA caching allocator, over a simulated device.

The rules were read in c10/cuda/CUDACachingAllocator.cpp, the constants in c10/core/AllocatorConfig.h of torch 2.13.
docs/virtual-device.md has them in a table, and names what is not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace, TraceEventKind
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import MIN_BLOCK, SMALL_LIMIT, block_size, segment_size
from lightning_memtools.memory.allocator.blocks import ALLOCATED, Block, BlockCache, FreeBlocks, Segment
from lightning_memtools.memory.allocator.segments import (
    DeviceSegments,
    Observer,
    grow,
    release_cached,
    release_oversize,
)
from lightning_memtools.memory.allocator.simulated_oom import SimulatedOutOfMemory
from lightning_memtools.memory.allocator.tally import Tally
from lightning_memtools.memory.stats import MemoryStats

_ROUND_MASK = ~(MIN_BLOCK - 1)


class CachingAllocator:
    """Simulates PyTorch's CUDA caching allocator on a simulated device. All sizes are in bytes.

    Nothing runs on the simulated device, so a freed block can be reused at once.

    Calls must not overlap. With several threads, or where finalizers free blocks (they may run in the middle of another
    call), the caller must hold a lock, as VirtualDevice does.

    Args:
        config: The settings; by default torch's defaults.
        capacity: The total memory of the device; None for no limit.
        used_by_others: The memory held by other processes, and by this process outside the allocator.
        record: Whether to keep an `AllocationTrace` of all requests for replays and snapshots (8 to 16 bytes per call).
        observer: Called at every action, with the action's name in torch's snapshots, the address and the size.

    Attributes:
        config: The settings.
        trace: The events since the allocator was created; None unless they are recorded.
        capacity: The total memory of the device; None for no limit.
        used_by_others: The memory of the device that is held outside of this allocator.
        alloc_retries: The number of times that the cache was emptied to serve a request (torch: num_alloc_retries).
        ooms: The number of times that `SimulatedOutOfMemory` was raised (torch: num_ooms).
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity: int | None = None,
        used_by_others: int = 0,
        record: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.config = config = config or AllocatorConfig()
        self.trace = AllocationTrace(config, capacity=capacity, used_by_others=used_by_others) if record else None
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.alloc_retries = 0
        self.ooms = 0
        self._tally = Tally()
        self._reserve = DeviceSegments(config, capacity, used_by_others, self._tally, observer)
        self._cache = cache = BlockCache(config, self._tally)
        self._default_small = cache.pool(0, is_small=True)
        self._default_large = cache.pool(0, is_small=False)
        self._divisions = config.roundup_power2_divisions
        self._observer = observer
        self._last_id = 0

    # --- requests of a program

    def malloc(self, n_bytes: int, *, stream: int = 0, label: str | None = None) -> Block:
        """Allocate a block of at least ``n_bytes`` bytes.

        Args:
            n_bytes: The requested size, at least 1: for an empty tensor torch makes no request.
            stream: The stream that the block is for. A freed block is reused on the same stream only.
            label: A name for the block, shown in snapshots.

        Raises:
            SimulatedOutOfMemory: The device has too little memory even after everything cached was released.
            ValueError: ``n_bytes`` is less than 1.
        """
        if n_bytes <= 0:
            raise ValueError(f"Cannot allocate {n_bytes} bytes: the size must be at least 1.")
        divisions = self._divisions
        size = block_size(n_bytes, divisions) if divisions else (n_bytes + MIN_BLOCK - 1) & _ROUND_MASK
        if stream:
            free_blocks = self._cache.pool(stream, is_small=size <= SMALL_LIMIT)
        else:
            free_blocks = self._default_small if size <= SMALL_LIMIT else self._default_large
        block = self._cache.take(free_blocks, size)
        if block is None:
            block = self._find_memory(free_blocks, size, n_bytes, label)
        if block.size != size or block.prev is not None or block.next is not None:
            self._cache.cut(block, size)
        block.state = ALLOCATED
        block.requested = n_bytes
        block.label = label
        self._last_id = block.id = self._last_id + 1
        self._tally.add_block(block.size, n_bytes)
        if self.trace is not None:
            self.trace.add_malloc(n_bytes, stream, label)
        if self._observer is not None:
            self._observer("alloc", block.address, n_bytes, block.free_blocks, label)
        return block

    def free(self, block: Block) -> None:
        """Free a block. It stays in the cache; nothing is released to the device.

        Raises:
            ValueError: The block is not allocated.
        """
        if block.state != ALLOCATED:
            raise ValueError(f"{block!r} is not allocated. It was freed before, or comes from another allocator.")
        if self.trace is not None:
            self.trace.add(TraceEventKind.FREE, block.id)
        if self._observer is not None:
            for action in ("free_requested", "free_completed"):
                self._observer(action, block.address, block.requested, block.free_blocks, block.label)
        self._tally.remove_block(block.size, block.requested)
        self._cache.put_back(block)

    def empty_cache(self) -> None:
        """Release every segment that has no used block, and every whole free page of expandable segments."""
        if self.trace is not None:
            self.trace.add(TraceEventKind.EMPTY_CACHE)
        self._release_cached()

    def reset_peaks(self) -> None:
        """Set the peaks of allocated and reserved memory to the current values."""
        if self.trace is not None:
            self.trace.add(TraceEventKind.RESET_PEAKS)
        self._tally.reset_peaks()

    def observe(self, observer: Observer | None) -> None:
        """Replace the observer that is called with every action; None for no observer."""
        self._observer = self._reserve.observer = observer

    # --- statistics

    @property
    def is_observed(self) -> bool:
        """True while an observer is called with every action."""
        return self._observer is not None

    @property
    def allocated(self) -> int:
        """The memory that tensors hold: the rounded sizes of the allocated blocks."""
        return self._tally.allocated

    @property
    def reserved(self) -> int:
        """The memory that is reserved from the device."""
        return self._tally.reserved

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peaks`."""
        return self._tally.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peaks`."""
        return self._tally.peak_reserved

    def stats(self) -> MemoryStats:
        """Return the allocator's current sizes, peaks and counts."""
        held, capacity = self._tally, self.capacity
        return MemoryStats(
            allocated=held.allocated,
            reserved=held.reserved,
            active=held.allocated,
            inactive_split=held.split,
            requested=held.requested,
            peak_allocated=held.peak_allocated,
            peak_reserved=held.peak_reserved,
            alloc_retries=self.alloc_retries,
            ooms=self.ooms,
            capacity=capacity,
            device_used=None if capacity is None else self.used_by_others + held.reserved,
        )

    def segments(self) -> list[Segment]:
        """Return the segments in address order."""
        return [self._reserve.segments[address] for address in sorted(self._reserve.segments)]

    def blocks(self) -> Iterator[Block]:
        """Yield every block of every segment in address order, whether allocated, free or unmapped."""
        for segment in self.segments():
            yield from segment.blocks()

    # --- implementation

    def _find_memory(self, free_blocks: FreeBlocks, size: int, n_bytes: int, label: str | None) -> Block:
        """Request ``size`` bytes from the device. If it has too little memory, release cached memory and try again."""
        block = self._ask_device(free_blocks, size)
        if (
            block is None
            and self.config.max_split_size is not None
            and release_oversize(self._reserve, free_blocks, size, self.config.max_split_size)
        ):
            block = self._ask_device(free_blocks, size)
        if block is None:
            self._release_cached()
            self.alloc_retries += 1
            block = self._ask_device(free_blocks, size)
        if block is None:
            raise self._out_of_memory(free_blocks, size, n_bytes, label)
        return block

    def _ask_device(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Return a new segment or newly mapped pages; None if the device is full or the memory fraction is reached."""
        ask = segment_size(size, self.config.large_segment_size)
        # Expandable segments map other amounts; torch compares this one with the allowance all the same.
        if not self._reserve.within_allowance(ask):
            return None
        if self.config.expandable_segments:
            return grow(self._reserve, free_blocks, size)
        return self._reserve.take_segment(free_blocks, ask)

    def _release_cached(self) -> None:
        release_cached(self._reserve, self._cache.pools())

    def _out_of_memory(
        self, free_blocks: FreeBlocks, size: int, n_bytes: int, label: str | None
    ) -> SimulatedOutOfMemory:
        self.ooms += 1
        if self.trace is not None:
            self.trace.add_failed_malloc(n_bytes, free_blocks.stream, label)
        reserve = self._reserve
        if self._observer is not None:
            # torch's snapshots give the device's free memory in place of an address.
            self._observer("oom", reserve.device_free or 0, size, free_blocks, label)
        return SimulatedOutOfMemory(
            requested=n_bytes,
            rounded=size,
            segment_size=segment_size(size, self.config.large_segment_size),
            capacity=self.capacity,
            free=reserve.device_free,
            used_by_others=self.used_by_others,
            allocated=self._tally.allocated,
            reserved=self._tally.reserved,
            allowed=reserve.allowed,
        )


def copy_of(allocator: CachingAllocator) -> CachingAllocator:
    """Return an independent copy of an allocator, with its blocks, cache and counts.

    Raises:
        ValueError: The allocator has an observer, which the copy would call too.
    """
    if allocator.is_observed:
        raise ValueError("An allocator that is observed cannot be copied: the copy would call the observer too.")
    # deepcopy would follow the chain of a segment's blocks recursively until Python's stack overflows.
    known: dict[int, object] = {id(block): object.__new__(Block) for block in allocator.blocks()}
    for block in allocator.blocks():
        for name in Block.__slots__:
            setattr(known[id(block)], name, deepcopy(getattr(block, name), known))
    return deepcopy(allocator, known)
