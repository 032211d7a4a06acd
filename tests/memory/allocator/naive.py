"""The caching allocator once more, as simply as it can be said: what the real simulation is compared with.

A segment is a list of live allocations; whatever lies between them is free. So free neighbours are merged by
definition, and nothing has to be kept in step. Every search looks at everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_memtools.memory.allocator import AllocatorConfig

KIB, MIB, GIB = 2**10, 2**20, 2**30
NO_LIMIT = 2**62


class NaiveOutOfMemoryError(Exception):
    pass


@dataclass
class Live:
    address: int
    size: int
    requested: int
    streams: set[int] = field(default_factory=set)
    waiting: bool = False


@dataclass
class NaiveSegment:
    address: int
    size: int
    stream: int
    pool: int
    small: bool
    page: int | None = None
    mapped: set[int] = field(default_factory=set)  # indices of pages with memory behind them
    live: list[Live] = field(default_factory=list)
    last_freed: int = 0

    @property
    def reserved(self) -> int:
        return self.size if self.page is None else len(self.mapped) * self.page

    def uses_page(self, page: int) -> bool:
        assert self.page is not None
        start = self.address + page * self.page
        return any(live.address < start + self.page and start < live.address + live.size for live in self.live)

    def parts(self) -> Iterator[tuple[int, int, str]]:
        """Address, size and state of all blocks, in order."""
        position = self.address
        for live in sorted(self.live, key=lambda live: live.address):
            yield from self._idle(position, live.address)
            yield live.address, live.size, "waiting" if live.waiting else "allocated"
            position = live.address + live.size
        yield from self._idle(position, self.address + self.size)

    def _idle(self, start: int, end: int) -> Iterator[tuple[int, int, str]]:
        while start < end:
            stop, state = end, "free"
            if self.page is not None:
                first = (start - self.address) // self.page
                is_mapped = first in self.mapped
                state = "free" if is_mapped else "unmapped"
                # The page at which the state changes ends the block.
                changes = [page for page in self._pages_after(first, end) if (page in self.mapped) != is_mapped]
                stop = min(self.address + changes[0] * self.page, end) if changes else end
            yield start, stop - start, state
            start = stop

    def _pages_after(self, first: int, end: int) -> range:
        assert self.page is not None
        last = min(max(self.mapped, default=-1) + 1, (end - 1 - self.address) // self.page)
        return range(first + 1, last + 1)


class NaiveAllocator:
    def __init__(self, config: AllocatorConfig, capacity: int | None, used_by_others: int = 0) -> None:
        self.config = config
        self.capacity = capacity
        self.used_by_others = used_by_others
        fraction = config.per_process_memory_fraction
        self.allowed = None if capacity is None or fraction == 1 else int(capacity * fraction)
        self.max_split = config.max_split_size or NO_LIMIT
        self.segments: list[NaiveSegment] = []
        self.next_address = 1 << 40
        self.spare: list[tuple[int, int]] = []
        self.blocks: dict[int, tuple[NaiveSegment, Live]] = {}
        self.released_pools: set[int] = set()
        self.unsplit_pools: set[int] = set()
        self.last_resorts: list[int] = []
        self.lookups = 0
        self.retries = self.ooms = 0
        self.peak_allocated = self.peak_reserved = 0

    # --- statistics, all from scratch

    @property
    def reserved(self) -> int:
        return sum(segment.reserved for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(live.size for segment in self.segments for live in segment.live if not live.waiting)

    @property
    def active(self) -> int:
        return sum(live.size for segment in self.segments for live in segment.live)

    @property
    def requested(self) -> int:
        return sum(live.requested for segment in self.segments for live in segment.live)

    @property
    def inactive_split(self) -> int:
        return sum(
            size
            for segment in self.segments
            if segment.page is None
            for _, size, state in segment.parts()
            if state == "free" and size < segment.size
        )

    def layout(self) -> list[tuple[int, int, str]]:
        return [part for segment in sorted(self.segments, key=lambda s: s.address) for part in segment.parts()]

    # --- the program's side

    def malloc(self, number: int, n_bytes: int, stream: int, pool: int) -> int:
        size = self.round(n_bytes)
        small = size <= MIB
        found = self.find(size, stream, pool, small) or self.ask(size, stream, pool, small)
        segment, address, free = found
        rest = free - size
        if segment.pool in self.unsplit_pools:
            taken = free
        elif small or self.config.expandable_segments:
            taken = size
        else:
            taken = size if size < self.max_split and rest > MIB else free
        live = Live(address, taken, n_bytes)
        segment.live.append(live)
        self.blocks[number] = (segment, live)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return address

    def free(self, number: int) -> None:
        segment, live = self.blocks[number]
        if live.streams:
            live.waiting = True
        else:
            self.complete(number)
        del segment

    def complete(self, number: int) -> None:
        segment, live = self.blocks.pop(number)
        segment.live.remove(live)
        segment.last_freed = self.lookups

    def record_stream(self, number: int, stream: int) -> None:
        segment, live = self.blocks[number]
        if stream != segment.stream:
            live.streams.add(stream)

    def synchronize(self, stream: int | None) -> None:
        for number, (_, live) in list(self.blocks.items()):
            if live.waiting:
                live.streams = set() if stream is None else live.streams - {stream}
                if not live.streams:
                    self.complete(number)

    def empty_cache(self) -> None:
        self.synchronize(None)
        for segment in list(self.segments):
            if segment.pool != 0 and segment.pool not in self.released_pools:
                continue
            if segment.page is None:
                if not segment.live:
                    self.segments.remove(segment)
                continue
            idle_pages = {page for page in segment.mapped if not segment.uses_page(page)}
            segment.mapped -= idle_pages
            if idle_pages and not segment.mapped:
                self.segments.remove(segment)
                self.spare.append((segment.size, segment.address))

    # --- the rules

    def round(self, n_bytes: int) -> int:
        divisions = 0
        if self.config.roundup_power2_divisions:
            interval = 0
            while interval < 15 and n_bytes >= 2 ** (interval + 21):
                interval += 1
            divisions = self.config.roundup_power2_divisions[interval]
        if divisions > 1 and n_bytes > 512 * divisions:
            power = 1
            while power * 2 <= n_bytes:
                power *= 2
            steps = [power + i * power // divisions for i in range(divisions + 1)]
            return next(step for step in steps if step >= n_bytes)
        return max((n_bytes + 511) // 512, 1) * 512

    def gaps(self, stream: int, pool: int, small: bool) -> list[tuple[int, int, int, NaiveSegment]]:
        """Free blocks by size and address; with each what it could grow to."""
        found = []
        for segment in self.segments:
            if (segment.stream, segment.pool, segment.small) != (stream, pool, small):
                continue
            parts = [*segment.parts(), (0, 0, "end")]
            for (address, size, state), (_, size_after, state_after) in pairwise(parts):
                if state == "free":
                    growable = size + (size_after if state_after == "unmapped" else 0)
                    found.append((size, address, growable, segment))
        return sorted(found, key=lambda gap: gap[:2])

    def find(self, size: int, stream: int, pool: int, small: bool) -> tuple[NaiveSegment, int, int] | None:
        if self.collects and pool == 0 and not small:
            self.lookups += 1
        fitting = [gap for gap in self.gaps(stream, pool, small) if gap[0] >= size]
        if not fitting:
            return None
        chosen = 0
        if self.config.expandable_segments:
            while chosen + 1 < len(fitting) and fitting[chosen + 1][2] < fitting[chosen][2]:
                chosen += 1
        free, address, _, segment = fitting[chosen]
        if size < self.max_split and free >= self.max_split:
            return None
        rounding = self.config.max_non_split_rounding or self.config.large_segment_size
        if size >= self.max_split and free >= size + rounding:
            return None
        return segment, address, free

    @property
    def collects(self) -> bool:
        return self.allowed is not None and self.config.garbage_collection_threshold > 0

    def ask(self, size: int, stream: int, pool: int, small: bool) -> tuple[NaiveSegment, int, int]:
        if self.collects:
            self.collect_garbage()
        found = self.device(size, stream, pool, small)
        if found is None and self.release_oversize(size, stream, pool, small):
            found = self.device(size, stream, pool, small)
        for other in self.last_resorts if pool == 0 else ():
            found = found or self.find(size, stream, other, small)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.device(size, stream, pool, small)
        if found is None:
            self.ooms += 1
            raise NaiveOutOfMemoryError
        return found

    def device_has(self, size: int) -> bool:
        return self.capacity is None or self.reserved + self.used_by_others + size <= self.capacity

    def device(self, size: int, stream: int, pool: int, small: bool) -> tuple[NaiveSegment, int, int] | None:
        if small:
            ask = 2 * MIB
        elif size < 10 * MIB:
            ask = self.config.large_segment_size
        else:
            ask = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.allowed is not None and self.reserved + ask > self.allowed:
            return None
        if self.config.expandable_segments:
            return self.grow(size, stream, pool, small)
        if not self.device_has(ask):
            return None
        segment = NaiveSegment(self.new_address(ask), ask, stream, pool, small)
        self.segments.append(segment)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return segment, segment.address, ask

    def new_address(self, size: int) -> int:
        address = self.next_address
        self.next_address += (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        return address

    def grow(self, size: int, stream: int, pool: int, small: bool) -> tuple[NaiveSegment, int, int] | None:
        segment, start = self.lowest_room(size, stream, pool, small)
        assert segment.page is not None
        # Map one unmapped range after the other until the free stretch from `start` is long enough.
        while True:
            free = next((part for part in segment.parts() if part[0] == start and part[2] == "free"), None)
            have = free[1] if free else 0
            if have >= size:
                return segment, start, have
            at, room, state = next(part for part in segment.parts() if part[0] == start + have)
            assert state == "unmapped"
            pages = -(-min(size - have, room) // segment.page)
            if not self.device_has(pages * segment.page):
                return None
            first = (at - segment.address) // segment.page
            segment.mapped |= set(range(first, first + pages))
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def lowest_room(self, size: int, stream: int, pool: int, small: bool) -> tuple[NaiveSegment, int]:
        for segment in sorted(self.segments, key=lambda s: s.address):
            if (segment.stream, segment.pool, segment.small) != (stream, pool, small):
                continue
            parts = list(segment.parts())
            for i, (_, _, state) in enumerate(parts):
                if state != "unmapped":
                    continue
                first = i - 1 if i > 0 and parts[i - 1][2] == "free" else i
                room = 0
                for _, part_size, part_state in parts[first:]:
                    if part_state not in {"free", "unmapped"}:
                        break
                    room += part_size
                if room >= size:
                    return segment, parts[first][0]
        page = 2 * MIB if small else self.config.large_segment_size
        total = 1024 * GIB if self.capacity is None else self.capacity + self.capacity // 8
        span = -(-total // page) * page
        spares = [spare for spare in self.spare if spare[0] == span]
        if spares:
            self.spare.remove(min(spares))
            address = min(spares)[1]
        else:
            address = self.new_address(span)
        segment = NaiveSegment(address, span, stream, pool, small, page)
        self.segments.append(segment)
        return segment, address

    def release_oversize(self, size: int, stream: int, pool: int, small: bool) -> bool:
        if self.config.max_split_size is None:
            return False
        wanted = max(size, self.max_split)
        gaps = self.gaps(stream, pool, small)
        fitting = [gap for gap in gaps if gap[0] >= wanted]
        if fitting and fitting[0][3].page is None:
            self.segments.remove(fitting[0][3])
            return True
        released = 0
        for free, _, _, segment in reversed([gap for gap in gaps if gap[0] < wanted]):
            if released < wanted and free >= self.max_split and segment.page is None:
                released += free
                self.segments.remove(segment)
        return released >= wanted

    def collect_garbage(self) -> None:
        assert self.allowed is not None
        target = self.reserved - int(self.config.garbage_collection_threshold * self.allowed)
        idle = [s for s in self.segments if s.pool == 0 and not s.small and not s.live and s.page is None]
        released = 0
        while idle and released < target:
            average = sum(self.lookups - s.last_freed for s in idle) / len(idle)
            old = [s for s in idle if self.lookups - s.last_freed >= average]
            for segment in old:
                released += segment.size
                self.segments.remove(segment)
            idle = [s for s in idle if s not in old]
