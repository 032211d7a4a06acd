"""Replays a recorded trace under other settings, with another capacity, or on an allocator that is in use."""

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
class ReplayedTrace:
    """The result of replaying a trace.

    Attributes:
        allocator: The allocator after the last event that was replayed.
        out_of_memory: The error that ended the replay early; None if every event was replayed.
    """

    allocator: CachingAllocator
    out_of_memory: SimulatedOutOfMemory | None = None

    @property
    def completed(self) -> bool:
        """True if every event was replayed."""
        return self.out_of_memory is None

    @property
    def stats(self) -> MemoryStats:
        """The statistics after the last event; peaks are those since the last `reset_peaks` in the trace."""
        return self.allocator.stats()


def replay(
    trace: AllocationTrace,
    *,
    config: AllocatorConfig | None = None,
    capacity: int | EllipsisType | None = ...,
    observer: Observer | None = None,
) -> ReplayedTrace:
    """Replay a trace on a new allocator.

    With the recorded settings, the allocator ends in the recorded state, block for block. With other settings, it ends
    in the state that the same program would have reached. The replay ends early if a request fails that succeeded in
    the recorded run. Requests that failed then are tried again; if they succeed now, their blocks are freed at once.

    Args:
        trace: The trace.
        config: The allocator's settings; by default those in the trace.
        capacity: The device's capacity in bytes, None for no limit; by default the capacity in the trace.
        observer: Called with every action, as for `CachingAllocator`.
    """
    allocator = CachingAllocator(
        config or trace.config,
        capacity=trace.capacity if isinstance(capacity, EllipsisType) else capacity,
        used_by_others=trace.used_by_others,
        observer=observer,
    )
    return replay_on(allocator, trace)


def replay_on(allocator: CachingAllocator, trace: AllocationTrace, *, n_skipped: int = 0) -> ReplayedTrace:
    """Replay a trace on an allocator that may hold blocks already.

    Args:
        allocator: The allocator, which is changed in place.
        trace: The trace.
        n_skipped: The number of allocations and frees to skip at the beginning, such as those that put the model on
            the device. Later frees of the skipped blocks are skipped too.
    """
    live: dict[int, Block] = {}
    n_allocations = 0
    stream, label = trace.contexts[0]
    for kind, number in trace.events():
        is_skipped = kind <= TraceEventKind.FREE and n_skipped > 0
        n_skipped -= is_skipped
        n_allocations += kind == TraceEventKind.MALLOC
        try:
            if kind == TraceEventKind.MALLOC and not is_skipped:
                live[n_allocations] = allocator.malloc(number, stream=stream, label=label)
            elif kind == TraceEventKind.FREE and number in live:
                allocator.free(live.pop(number))
            elif kind == TraceEventKind.CONTEXT:
                stream, label = trace.contexts[number]
            elif kind == TraceEventKind.FAILED_MALLOC:
                _try_malloc(allocator, number, stream, label)
            elif kind == TraceEventKind.EMPTY_CACHE:
                allocator.empty_cache()
            elif kind == TraceEventKind.RESET_PEAKS:
                allocator.reset_peaks()
        except SimulatedOutOfMemory as error:
            return ReplayedTrace(allocator, error)
    return ReplayedTrace(allocator)


def _try_malloc(allocator: CachingAllocator, n_bytes: int, stream: int, label: str | None) -> None:
    try:
        block = allocator.malloc(n_bytes, stream=stream, label=label)
    except SimulatedOutOfMemory:
        return
    allocator.free(block)
