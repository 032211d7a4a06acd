"""Carrying out a recorded trace again: under other settings, on a device of another size."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace, TraceEventKind
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.blocks import Block
from lightning_memtools.memory.allocator.caching_allocator import CachingAllocator
from lightning_memtools.memory.allocator.segments import Observer
from lightning_memtools.memory.allocator.simulated_oom import SimulatedOutOfMemory
from lightning_memtools.memory.stats import MemoryStats


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a replayed trace.

    Attributes:
        allocator: The allocator after the last event that was carried out.
        n_events: How many events were carried out.
        out_of_memory: Why the replay ended early: memory ran out where the recorded program had enough. None if it
            came to the end.
        label: What the allocation that found no memory is called.
    """

    allocator: CachingAllocator
    n_events: int
    out_of_memory: SimulatedOutOfMemory | None = None
    label: str | None = None

    @property
    def completed(self) -> bool:
        """Whether every event was carried out."""
        return self.out_of_memory is None

    @property
    def stats(self) -> MemoryStats:
        """The statistics at the end, peaks since the last reset that the trace holds."""
        return self.allocator.stats()


def replay(
    trace: AllocationTrace,
    *,
    config: AllocatorConfig | None = None,
    capacity: int | EllipsisType | None = ...,
    observer: Observer | None = None,
) -> Replay:
    """Carry out what a trace holds on a new allocator.

    With the recorded settings the result is the state that was recorded, block for block. With others it is what the
    same program would have made of them, up to the first request that finds no memory: what the program would have
    done then is not known. A request that found no memory when it was recorded is tried again, and freed at once where
    it now succeeds.

    Args:
        trace: What to carry out.
        config: The allocator's settings; the recorded ones when left out.
        capacity: The device's capacity in bytes, None for no limit; the recorded one when left out.
        observer: Called with every action, as for `CachingAllocator`.
    """
    allocator = CachingAllocator(
        config or trace.config,
        capacity=trace.capacity if isinstance(capacity, EllipsisType) else capacity,
        used_by_others=trace.used_by_others,
        observer=observer,
    )
    player = _Player(trace, allocator)
    n_events = 0
    for kind, number in trace.events():
        try:
            player.carry_out(kind, number)
        except SimulatedOutOfMemory as error:
            return Replay(allocator, n_events, error, player.context.label)
        n_events += 1
    return Replay(allocator, n_events)


class _Player:
    """Holds what the next event refers to: the blocks by number, the stream and the label named last."""

    def __init__(self, trace: AllocationTrace, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.contexts = trace.contexts
        self.context = trace.contexts[0]
        self.stream = 0
        self.n_allocations = 0
        self.live: dict[int, Block] = {}

    def carry_out(self, kind: int, number: int) -> None:  # noqa: C901, one branch per kind of event
        allocator = self.allocator
        if kind == TraceEventKind.MALLOC:
            self.n_allocations += 1
            self.live[self.n_allocations] = self._malloc(number)
        elif kind == TraceEventKind.FREE:
            allocator.free(self.live.pop(number))
        elif kind == TraceEventKind.CONTEXT:
            self.context = self.contexts[number]
        elif kind == TraceEventKind.FAILED_MALLOC:
            self._try_malloc(number)
        elif kind == TraceEventKind.EMPTY_CACHE:
            allocator.empty_cache()
        elif kind == TraceEventKind.STREAM:
            self.stream = number
        elif kind == TraceEventKind.RECORD_STREAM:
            allocator.record_stream(self.live[number], self.stream)
        elif kind == TraceEventKind.SYNCHRONIZE:
            allocator.synchronize(self.stream if number else None)
        elif kind == TraceEventKind.RELEASE_POOL:
            allocator.release_pool(number)
        elif kind == TraceEventKind.RESET_PEAKS:
            allocator.reset_peaks()
        elif kind == TraceEventKind.USED_BY_OTHERS:
            allocator.used_by_others = number
        else:
            raise ValueError(f"Unknown kind of event {kind}: the trace was written by a newer version.")

    def _malloc(self, n_bytes: int) -> Block:
        context = self.context
        return self.allocator.malloc(n_bytes, stream=context.stream, pool=context.pool, label=context.label)

    def _try_malloc(self, n_bytes: int) -> None:
        try:
            block = self._malloc(n_bytes)
        except SimulatedOutOfMemory:
            return
        self.allocator.free(block)
