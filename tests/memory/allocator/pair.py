"""The allocator and the naive one, driven together and compared after every call."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memtools.memory.allocator import AllocatorConfig, Block, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.allocator.blocks import ALLOCATED, FREE, UNMAPPED, WAITING
from tests.memory.allocator.naive import NaiveAllocator, NaiveOutOfMemoryError

CONFIGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:24,max_non_split_rounding_mb:40",
    "expandable_segments:True,max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,2:4,4:8,>:1]",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
    "expandable_segments:True,garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "large_segment_size_mb:30",
]
_NAMES = {FREE: "free", ALLOCATED: "allocated", WAITING: "waiting", UNMAPPED: "unmapped"}


def layout(allocator: CachingAllocator) -> list[tuple[int, int, str]]:
    return [(block.address, block.size, _NAMES[block.state]) for block in allocator.blocks()]


def cached(allocator: CachingAllocator, *segments: int) -> list[Block]:
    """Leave free segments of these sizes in the cache, in this order of age."""
    blocks = [allocator.malloc(size) for size in segments]
    for block in blocks:
        allocator.free(block)
    return blocks


@dataclass
class Pair:
    ours: CachingAllocator
    naive: NaiveAllocator
    held: dict[int, Block] = field(default_factory=dict)
    n_mallocs: int = 0

    @classmethod
    def of(cls, config: str, capacity: int | None) -> Pair:
        settings = AllocatorConfig.parse(config)
        return cls(CachingAllocator(settings, capacity=capacity, record=True), NaiveAllocator(settings, capacity))

    def malloc(self, n_bytes: int, *, stream: int = 0, pool: int = 0) -> bool:
        """Allocate in both; whether there was memory."""
        self.n_mallocs += 1
        number = self.n_mallocs
        try:
            address: int | None = self.naive.malloc(number, n_bytes, stream, pool)
        except NaiveOutOfMemoryError:
            address = None
        try:
            self.held[number] = self.ours.malloc(n_bytes, stream=stream, pool=pool)
        except SimulatedOutOfMemory:
            assert address is None
            return False
        assert self.held[number].address == address
        return True

    def free(self, number: int) -> None:
        self.naive.free(number)
        self.ours.free(self.held.pop(number))

    def record_stream(self, number: int, stream: int) -> None:
        self.naive.record_stream(number, stream)
        self.ours.record_stream(self.held[number], stream)

    def synchronize(self, stream: int | None) -> None:
        self.naive.synchronize(stream)
        self.ours.synchronize(stream)

    def empty_cache(self) -> None:
        self.naive.empty_cache()
        self.ours.synchronize()  # `reclaimable` does not count what waits for a stream
        would_fall = self.ours.reclaimable
        before = self.ours.reserved
        self.ours.empty_cache()
        assert before - self.ours.reserved == would_fall

    def set_pool_options(self, pool: int, *, no_split: bool, use_on_oom: bool) -> None:
        self.ours.set_pool_options(pool, no_split=no_split, use_on_oom=use_on_oom)
        if no_split:
            self.naive.unsplit_pools.add(pool)
        if use_on_oom:
            self.naive.last_resorts.append(pool)

    def release_pool(self, pool: int) -> None:
        self.naive.released_pools.add(pool)
        self.naive.last_resorts = [other for other in self.naive.last_resorts if other != pool]
        self.ours.release_pool(pool)

    def set_used_by_others(self, n_bytes: int) -> None:
        self.naive.used_by_others = self.ours.used_by_others = n_bytes

    def check(self) -> None:
        ours, naive = self.ours, self.naive
        stats = ours.stats()
        assert stats.allocated == naive.allocated == sum(block.size for block in self.held.values())
        assert stats.reserved == naive.reserved == sum(segment.mapped for segment in ours.segments())
        assert stats.active == naive.active
        assert stats.requested == naive.requested
        assert stats.inactive_split == naive.inactive_split
        assert (stats.peak_allocated, stats.peak_reserved) == (naive.peak_allocated, naive.peak_reserved)
        assert (stats.alloc_retries, stats.ooms) == (naive.retries, naive.ooms)
        assert layout(ours) == naive.layout()
