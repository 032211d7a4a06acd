"""A simulation of PyTorch's CUDA caching allocator, over a simulated device.

The rules were read in c10/cuda/CUDACachingAllocator.cpp, the constants in c10/core/AllocatorConfig.h of torch 2.13.
docs/virtual-device.md has them in a table, and names what is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace, TraceEventKind
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.block_rounding import MIN_BLOCK, SMALL_LIMIT, block_size, segment_size
from lightning_memtools.memory.allocator.blocks import ALLOCATED, WAITING, Block, BlockCache, FreeBlocks, Segment
from lightning_memtools.memory.allocator.segments import (
    DeviceSegments,
    Observer,
    collect_garbage,
    grow,
    reclaimable,
    release_cached,
    release_oversize,
)
from lightning_memtools.memory.allocator.simulated_oom import SimulatedOutOfMemory
from lightning_memtools.memory.allocator.tally import Count, Tally
from lightning_memtools.memory.stats import MemoryStats

_ROUND_MASK = ~(MIN_BLOCK - 1)


class CachingAllocator:
    """PyTorch's CUDA caching allocator over a simulated device; all sizes in bytes.

    Nothing runs on the simulated device. So the events by which a block used on another stream becomes free complete
    only in `synchronize`, in `empty_cache`, and when a request finds no memory: then torch waits for them.

    Calls must not overlap: with several threads, or where finalizers free blocks (they may run in the middle of another
    call), the caller holds a lock, as VirtualDevice does.

    Args:
        config: The settings; torch's defaults when left out.
        capacity: The total memory of the device; None for no limit.
        used_by_others: The memory held by other processes, and by this one outside the allocator.
        record: Keep an `AllocationTrace` of all requests, for replay and for snapshots: 8 to 16 bytes per call.
        observer: Called with every action as torch's snapshots name them, with addresses.

    Attributes:
        config: The settings.
        trace: The events since the allocator was made, if they are recorded.
        zero_block: The block of size 0 that `malloc` returns for zero bytes and `free` ignores.
        free_memory_callbacks: Called when no cached block fits; if one returns True the search is repeated.
        alloc_retries: The number of times that the whole cache was released for a request (torch: num_alloc_retries).
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
        self.free_memory_callbacks: list[Callable[[], bool]] = []
        self.alloc_retries = 0
        self.ooms = 0
        self._whole = Tally()
        self._oversize = Count()
        self._reserve = DeviceSegments(config, capacity, used_by_others, self._whole, observer)
        self._collects_garbage = self._reserve.allowed is not None and config.garbage_collection_threshold > 0
        self._cache = cache = BlockCache(config, self._whole, ages=self._collects_garbage)
        self._default_small = cache.pool(0, 0, is_small=True)
        self._default_large = cache.pool(0, 0, is_small=False)
        self.zero_block = Segment(0, 0, self._default_small).first
        self._divisions = config.roundup_power2_divisions
        self._observer = observer
        self._waiting: list[Block] = []
        self._released_pools: set[int] = set()
        self._last_resorts: list[int] = []
        self._last_id = 0
        self._syncs = 0

    # --- requests of a program

    def malloc(self, n_bytes: int, *, stream: int = 0, pool: int = 0, label: str | None = None) -> Block:
        """Allocate a block of at least ``n_bytes`` bytes.

        Args:
            n_bytes: The requested size. Zero returns `zero_block`, and nothing is counted.
            stream: The stream it is for: blocks are reused on their own stream only.
            pool: The private pool to take it from; 0 is the default pool.
            label: The holder's name for it; shown in snapshots.

        Raises:
            SimulatedOutOfMemory: The device has too little memory even after everything cached was released.
            ValueError: ``n_bytes`` is negative.
        """
        if n_bytes <= 0:
            return self._zero_bytes(n_bytes)
        divisions = self._divisions
        size = block_size(n_bytes, divisions) if divisions else (n_bytes + MIN_BLOCK - 1) & _ROUND_MASK
        if stream or pool:
            free_blocks = self._cache.pool(stream, pool, is_small=size <= SMALL_LIMIT)
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
        free_blocks.tally.add_block(block.size, n_bytes)
        self._whole.add_block(block.size, n_bytes)
        if block.size >= self._cache.max_split:
            self._oversize.add()
        if self.trace is not None:
            self.trace.add_malloc(n_bytes, stream, pool, label)
        if self._observer is not None:
            self._observer("alloc", block.address, n_bytes, block.free_blocks, label)
        return block

    def free(self, block: Block) -> None:
        """Free a block. It stays in the cache: nothing is released to the device.

        A block that was used on another stream (`record_stream`) is not reused before `synchronize`.

        Raises:
            ValueError: The block is not allocated.
        """
        if block.state != ALLOCATED:
            self._check_is_zero_block(block)
            return
        if self.trace is not None:
            self.trace.add_free(block.id)
        if self._observer is not None:
            self._observer("free_requested", block.address, block.requested, block.free_blocks, block.label)
        if block.size >= self._cache.max_split:
            self._oversize.remove()
        tally = block.free_blocks.tally
        if block.stream_uses:
            block.state = WAITING
            tally.start_waiting(block.size)
            self._whole.start_waiting(block.size)
            self._waiting.append(block)
            return
        tally.remove_block(block.size, block.requested)
        self._whole.remove_block(block.size, block.requested)
        self._complete_free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block: once freed, the block waits for that stream.

        Raises:
            ValueError: The block is not allocated.
        """
        if block.state != ALLOCATED:
            self._check_is_zero_block(block)
            return
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)
        if self.trace is not None:
            self.trace.add(TraceEventKind.STREAM, stream)
            self.trace.add(TraceEventKind.RECORD_STREAM, block.id)

    def synchronize(self, stream: int | None = None) -> None:
        """Let a stream (None: every stream) finish its work: blocks that waited only for it become free."""
        if self.trace is not None:
            if stream is not None:
                self.trace.add(TraceEventKind.STREAM, stream)
            self.trace.add(TraceEventKind.SYNCHRONIZE, stream is not None)
        self._complete_events(stream)

    def empty_cache(self) -> None:
        """Release every segment without a used block; of expandable segments every whole free page.

        Waits for all streams first. Segments of a private pool stay until `release_pool`.
        """
        if self.trace is not None:
            self.trace.add(TraceEventKind.EMPTY_CACHE)
        self._release_cached()

    def release_pool(self, pool: int) -> None:
        """Declare that nobody will use a private pool again, so that `empty_cache` may release its segments."""
        if self.trace is not None:
            self.trace.add(TraceEventKind.RELEASE_POOL, pool)
        self._release_pool(pool)

    def delete_pool(self, pool: int) -> None:
        """Do what deleting a ``torch.cuda.MemPool`` does: `release_pool`, and its unused segments are released now."""
        if self.trace is not None:
            self.trace.add(TraceEventKind.DELETE_POOL, pool)
        self._release_pool(pool)
        self._release_cached([each for each in self._releasable() if each.pool == pool])

    def set_pool_options(self, pool: int, *, no_split: bool = False, use_on_oom: bool = False) -> None:
        """Give a private pool the options of ``torch.cuda.MemPool``, before anything is allocated from it.

        Args:
            pool: The pool's number.
            no_split: Never cut a block to the size of a request: each request gets a whole segment.
            use_on_oom: Serve requests to the default pool from this pool's free blocks before running out of memory.

        Raises:
            ValueError: The pool is the default pool, or has memory already.
        """
        if pool == 0 or any(segment.free_blocks.pool == pool for segment in self.segments()):
            reason = "that is the default pool" if pool == 0 else "it has memory already"
            raise ValueError(f"Pool {pool} cannot get options: {reason}. Only a new private pool can.")
        if self.trace is not None:
            self.trace.add(TraceEventKind.POOL_OPTIONS, pool << 2 | use_on_oom << 1 | no_split)
        if no_split:
            self._cache.unsplit_pools.add(pool)
        if use_on_oom:
            self._last_resorts.append(pool)

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        if self.trace is not None:
            self.trace.add(TraceEventKind.RESET_PEAKS)
        for tally in (self._cache.small, self._cache.large, self._whole):
            tally.reset_peaks()
        for count in (self._oversize, self._reserve.oversize):
            count.reset_peak()

    def observe(self, observer: Observer | None) -> None:
        """Call another observer with every action from now on, in place of the one before; None for no observer."""
        self._observer = self._reserve.observer = observer

    # --- statistics

    @property
    def is_observed(self) -> bool:
        """True while an observer is called with every action."""
        return self._observer is not None

    @property
    def allocated(self) -> int:
        """The memory that tensors hold: the rounded sizes of the allocated blocks."""
        return self._whole.allocated

    @property
    def reserved(self) -> int:
        """The memory held of the device."""
        return self._whole.reserved

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peaks`."""
        return self._whole.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peaks`."""
        return self._whole.peak_reserved

    @property
    def capacity(self) -> int | None:
        """The total memory of the device; None for no limit."""
        return self._reserve.capacity

    @property
    def used_by_others(self) -> int:
        """The memory of the device that others hold. It may be set."""
        return self._reserve.used_by_others

    @used_by_others.setter
    def used_by_others(self, n_bytes: int) -> None:
        if self.trace is not None:
            self.trace.add(TraceEventKind.USED_BY_OTHERS, n_bytes)
        self._reserve.used_by_others = n_bytes

    @property
    def device_free(self) -> int | None:
        """The free memory of the device; None when it has no limit."""
        return self._reserve.device_free

    @property
    def reclaimable(self) -> int:
        """The memory that `empty_cache` would release; blocks that wait for another stream count as used."""
        return reclaimable(self._releasable())

    def stats(self) -> MemoryStats:
        """Return the statistics."""
        whole = self._whole
        capacity = self._reserve.capacity
        return MemoryStats(
            allocated=whole.allocated,
            reserved=whole.reserved,
            active=whole.allocated + whole.waiting,
            inactive_split=whole.split,
            requested=whole.requested,
            peak_allocated=whole.peak_allocated,
            peak_reserved=whole.peak_reserved,
            alloc_retries=self.alloc_retries,
            ooms=self.ooms,
            capacity=capacity,
            device_used=None if capacity is None else self._reserve.used_by_others + whole.reserved,
        )

    def memory_stats(self) -> dict[str, int]:
        """Return every counter by its name in ``torch.cuda.memory_stats``, such as "allocated_bytes.large_pool.peak".

        Those of single private pools are left out, and those that can only be zero here ("num_oom_rejections").
        """
        max_split = self.config.max_split_size
        stats = {
            "num_alloc_retries": self.alloc_retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self._syncs,
            "num_device_alloc": self._reserve.device_allocs,
            "num_device_free": self._reserve.device_frees,
            "max_split_size": -1 if max_split is None else max_split,  # torch: the largest size_t, as a signed number
        }
        for metric, count in (("allocations", self._oversize), ("segments", self._reserve.oversize)):
            for kind, value in count.as_torch_names().items():
                stats[f"oversize_{metric}.{kind}"] = value
        pools = {"all": self._whole, "large_pool": self._cache.large, "small_pool": self._cache.small}
        for pool, tally in pools.items():
            for name, value in tally.as_torch_names().items():
                metric, kind = name.split(".")
                stats[f"{metric}.{pool}.{kind}"] = value
        return dict(sorted(stats.items()))

    def segments(self) -> list[Segment]:
        """Return the segments, by address."""
        return [self._reserve.segments[address] for address in sorted(self._reserve.segments)]

    def blocks(self) -> Iterator[Block]:
        """Yield every block of every segment by address, allocated or not, with unmapped ranges."""
        for segment in self.segments():
            yield from segment.blocks()

    # --- implementation

    def _zero_bytes(self, n_bytes: int) -> Block:
        if n_bytes < 0:
            raise ValueError(f"Cannot allocate {n_bytes} bytes: the size must not be negative.")
        return self.zero_block

    def _check_is_zero_block(self, block: Block) -> None:
        if block is not self.zero_block:
            raise ValueError(f"{block!r} is not allocated. It was freed before, or comes from another allocator.")

    def _complete_free(self, block: Block) -> None:
        if self._observer is not None:
            self._observer("free_completed", block.address, block.requested, block.free_blocks, block.label)
        self._cache.put_back(block)

    def _complete_events(self, stream: int | None) -> None:
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            uses = block.stream_uses
            assert uses is not None
            if stream is None:
                uses.clear()
            else:
                uses.discard(stream)
            if uses:
                self._waiting.append(block)
                continue
            block.free_blocks.tally.stop_waiting(block.size, block.requested)
            self._whole.stop_waiting(block.size, block.requested)
            self._complete_free(block)

    def _find_memory(self, free_blocks: FreeBlocks, size: int, n_bytes: int, label: str | None) -> Block:
        """Serve a request that no cached block fits, or raise: torch's sequence, in DeviceCachingAllocator::malloc."""
        # A list, not a generator: every callback runs, whatever the others return.
        if any([callback() for callback in self.free_memory_callbacks]):  # noqa: C419
            block = self._cache.take(free_blocks, size)
            if block is not None:
                return block
        if self._collects_garbage:
            large = [pool for pool in self._cache.pools() if pool.pool == 0 and not pool.is_small]
            collect_garbage(self._reserve, large, self._cache.lookups, self.config.garbage_collection_threshold)
        block = self._ask_device(free_blocks, size)
        if (
            block is None
            and self.config.max_split_size is not None
            and release_oversize(self._reserve, free_blocks, size, self.config.max_split_size)
        ):
            block = self._ask_device(free_blocks, size)
        if block is None and free_blocks.pool == 0:
            block = self._from_last_resorts(free_blocks, size)
        if block is None:
            self._release_cached()
            self.alloc_retries += 1
            block = self._ask_device(free_blocks, size)
        if block is None:
            raise self._out_of_memory(free_blocks, size, n_bytes, label)
        return block

    def _from_last_resorts(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Take a free block of a private pool that may serve the default pool before memory runs out."""
        for pool in self._last_resorts:
            others = self._cache.pool(free_blocks.stream, pool, is_small=free_blocks.is_small)
            if (block := self._cache.take(others, size)) is not None:
                return block
        return None

    def _ask_device(self, free_blocks: FreeBlocks, size: int) -> Block | None:
        """Reserve a segment, or map pages of an expandable one, within the allowance and the device (alloc_block)."""
        ask = segment_size(size, self.config.large_segment_size)
        # Expandable segments map other amounts; torch compares this one with the allowance all the same.
        if not self._reserve.within_allowance(ask):
            return None
        if self.config.expandable_segments:
            return grow(self._reserve, free_blocks, size)
        return self._reserve.take_segment(free_blocks, ask)

    def _release_pool(self, pool: int) -> None:
        self._released_pools.add(pool)
        self._last_resorts = [other for other in self._last_resorts if other != pool]

    def _release_cached(self, pools: list[FreeBlocks] | None = None) -> None:
        self._syncs += 1
        self._complete_events(None)
        release_cached(self._reserve, self._releasable() if pools is None else pools)

    def _releasable(self) -> list[FreeBlocks]:
        """Return the pools whose segments may be released, in the order of their release."""
        pools = [pool for pool in self._cache.pools() if pool.pool == 0 or pool.pool in self._released_pools]
        # The default pool's large blocks before its small ones, of private pools the small ones first.
        return sorted(pools, key=lambda pool: (pool.pool, pool.is_small == (pool.pool == 0)))

    def _out_of_memory(
        self, free_blocks: FreeBlocks, size: int, n_bytes: int, label: str | None
    ) -> SimulatedOutOfMemory:
        self.ooms += 1
        if self.trace is not None:
            self.trace.add_failed_malloc(n_bytes, free_blocks.stream, free_blocks.pool, label)
        reserve = self._reserve
        if self._observer is not None:
            # torch's snapshots give the device's free memory in place of an address.
            self._observer("oom", reserve.device_free or 0, size, free_blocks, label)
        private = [pool for pool in self._cache.pools() if pool.pool != 0]
        return SimulatedOutOfMemory(
            requested=n_bytes,
            rounded=size,
            segment_size=segment_size(size, self.config.large_segment_size),
            capacity=reserve.capacity,
            free=reserve.device_free,
            used_by_others=reserve.used_by_others,
            allocated=self._whole.allocated,
            reserved=self._whole.reserved,
            allowed=reserve.allowed,
            private_pools=sum(block.size for pool in private for block in pool.blocks),
            stream=free_blocks.stream,
        )


def copy_of(allocator: CachingAllocator) -> CachingAllocator:
    """Return an allocator with the same blocks, cache and counts, which shares nothing with the first.

    Raises:
        ValueError: The allocator is observed or has callbacks, which a copy would call too.
    """
    if allocator.is_observed or allocator.free_memory_callbacks:
        raise ValueError("An allocator that is observed or has callbacks cannot be copied: the copy would call them.")
    # deepcopy would follow the chain of a segment's blocks recursively until Python's stack overflows.
    known: dict[int, object] = {id(block): object.__new__(Block) for block in allocator.blocks()}
    for block in allocator.blocks():
        for name in Block.__slots__:
            setattr(known[id(block)], name, deepcopy(getattr(block, name), known))
    return deepcopy(allocator, known)
