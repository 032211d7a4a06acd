"""A simulation of PyTorch's CUDA caching allocator: which block serves which request, and what is asked of the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lightning_memtools.memory.allocator.blocks import ADDRESS_BITS, Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.errors import SimulatedOutOfMemory
from lightning_memtools.memory.allocator.rounding import MIN_BLOCK, SMALL_LIMIT, block_size, segment_size
from lightning_memtools.memory.allocator.tally import Tally
from lightning_memtools.memory.stats import MemoryStats


class CachingAllocator:
    """First cut: completed in the next commits; the interface stays."""

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity: int | None = None,
        used_by_others: int = 0,
        record: bool = False,
    ) -> None:
        self.config = config or AllocatorConfig()
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.record = record
        self.allocated = 0
        self.reserved = 0
        self.requested = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.alloc_retries = 0
        self.ooms = 0
        self._pending = 0
        self._small = Tally(is_small=True)
        self._large = Tally(is_small=False)
        self._free: dict[tuple[int, int, bool], FreeBlocks] = {}
        self._segments: dict[int, Segment] = {}
        self._next_address = 1 << 40
        self._next_id = 0
        self.zero = Block(0, 0, self._free_blocks(0, 0, is_small=True), Segment(0, 0, self._free_blocks(0, 0, is_small=True)))

    def malloc(self, n_bytes: int, *, stream: int = 0, pool: int = 0, label: str | None = None) -> Block:
        """Give out a block; raises SimulatedOutOfMemory after the full miss sequence."""
        if n_bytes <= 0:
            return self.zero
        size = block_size(n_bytes, self.config.roundup_power2_divisions)
        free = self._free_blocks(stream, pool, is_small=size <= SMALL_LIMIT)
        block = self._find(free, size) or self._miss(free, size, n_bytes)
        rest = block.size - size
        if rest >= MIN_BLOCK if free.is_small else rest > SMALL_LIMIT:
            remaining = Block(block.address + size, rest, free, block.segment)
            remaining.prev, remaining.next = block, block.next
            if block.next is not None:
                block.next.prev = remaining
            block.next = remaining
            block.size = size
            free.add(remaining)
        block.allocated = True
        block.requested = n_bytes
        block.label = label
        self._next_id += 1
        block.id = self._next_id
        self.allocated += block.size
        self.requested += n_bytes
        self.peak_allocated = max(self.allocated, self.peak_allocated)
        return block

    def free(self, block: Block) -> None:
        """Take a block back into the cache; the device gets nothing."""
        if block.size == 0:
            return
        if not block.allocated:
            raise ValueError(f"{block!r} is already free.")
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        free = block.free_blocks
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            free.remove(before)
            block.address, block.size, block.prev = before.address, block.size + before.size, before.prev
            if block.prev is not None:
                block.prev.next = block
            else:
                block.segment.first = block
        if after is not None and not after.allocated:
            free.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.prev = block
        free.add(block)

    def empty_cache(self) -> None:
        """Give every segment without a used block back to the device."""
        for free in self._free.values():
            for block in [block for block in free.blocks if not block.is_split]:
                free.remove(block)
                del self._segments[block.segment.address]
                self.reserved -= block.size

    def reset_peaks(self) -> None:
        """Set the peaks to the current values."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    @property
    def reclaimable(self) -> int:
        """What `empty_cache` would give back, in bytes."""
        return sum(b.size for free in self._free.values() for b in free.blocks if not b.is_split)

    def stats(self) -> MemoryStats:
        """The statistics now."""
        split = sum(b.size for free in self._free.values() for b in free.blocks if b.is_split)
        used = None if self.capacity is None else self.used_by_others + self.reserved
        return MemoryStats(
            allocated=self.allocated,
            reserved=self.reserved,
            active=self.allocated + self._pending,
            inactive_split=split,
            requested=self.requested,
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
            alloc_retries=self.alloc_retries,
            ooms=self.ooms,
            capacity=self.capacity,
            device_used=used,
        )

    def segments(self) -> Iterator[Segment]:
        """Every segment, by address."""
        for address in sorted(self._segments):
            yield self._segments[address]

    def blocks(self) -> Iterator[Block]:
        """Every block of every segment, by address."""
        for segment in self.segments():
            block: Block | None = segment.first
            while block is not None:
                yield block
                block = block.next

    def _free_blocks(self, stream: int, pool: int, *, is_small: bool) -> FreeBlocks:
        key = (stream, pool, is_small)
        free = self._free.get(key)
        if free is None:
            tally = self._small if is_small else self._large
            free = self._free[key] = FreeBlocks(stream=stream, pool=pool, is_small=is_small, tally=tally)
        return free

    def _find(self, free: FreeBlocks, size: int) -> Block | None:
        index = bisect_left(free.keys, size << ADDRESS_BITS)
        if index == len(free.keys):
            return None
        del free.keys[index]
        return free.blocks.pop(index)

    def _miss(self, free: FreeBlocks, size: int, n_bytes: int) -> Block:
        ask = segment_size(size)
        if not self._fits(ask):
            self.empty_cache()
            self.alloc_retries += 1
        if not self._fits(ask):
            self.ooms += 1
            left = None if self.capacity is None else self.capacity - self.used_by_others - self.reserved
            raise SimulatedOutOfMemory(
                requested=n_bytes,
                rounded=size,
                segment_size=ask,
                capacity=self.capacity,
                free=left,
                used_by_others=self.used_by_others,
                allocated=self.allocated,
                reserved=self.reserved,
                allowed=None,
                private_pools=0,
                stream=free.stream,
            )
        segment = Segment(self._next_address, ask, free)
        self._next_address += ask
        self._segments[segment.address] = segment
        self.reserved += ask
        self.peak_reserved = max(self.reserved, self.peak_reserved)
        return segment.first

    def _fits(self, n_bytes: int) -> bool:
        return self.capacity is None or self.used_by_others + self.reserved + n_bytes <= self.capacity
