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
        n_events: The number of events that were replayed.
        out_of_memory: The failed request that ended the replay early; None if it reached the end.
        label: The label of the failed request.
    """

    allocator: CachingAllocator
    n_events: int
    out_of_memory: SimulatedOutOfMemory | None = None
    label: str | None = None

    @property
    def completed(self) -> bool:
        """True if every event was replayed."""
        return self.out_of_memory is None

    @property
    def stats(self) -> MemoryStats:
        """The statistics after the last event, with the peaks since the last reset in the trace."""
        return self.allocator.stats()


def replay(
    trace: AllocationTrace,
    *,
    config: AllocatorConfig | None = None,
    capacity: int | EllipsisType | None = ...,
    observer: Observer | None = None,
) -> ReplayedTrace:
    """Replay a trace on a new allocator.

    With the recorded settings the result is the state that was recorded, block for block. With others it is the state
    that the same program would have led to, up to the first request that fails, because nobody knows what the program
    would have done then. A request that failed when it was recorded is tried again, and freed at once if it succeeds.

    Args:
        trace: The trace.
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
    return replay_on(allocator, trace)


def replay_on(allocator: CachingAllocator, trace: AllocationTrace, *, n_skipped: int = 0) -> ReplayedTrace:
    """Replay a trace on an allocator that may hold blocks already.

    Args:
        allocator: The allocator; it changes.
        trace: The trace.
        n_skipped: The number of allocations and frees at the beginning that are skipped. Frees of blocks that these
            allocated are skipped too. In the trace of an estimate they put the model on the device.
    """
    player = _Player(trace, allocator, n_skipped)
    n_events = 0
    for kind, number in trace.events():
        try:
            if not player.skips(kind, number):
                player.play(kind, number)
        except SimulatedOutOfMemory as error:
            return ReplayedTrace(allocator, n_events, error, player.context.label)
        n_events += 1
    return ReplayedTrace(allocator, n_events)


class _Player:
    """Holds the state that events refer to: the live blocks by number, and the current stream and context."""

    def __init__(self, trace: AllocationTrace, allocator: CachingAllocator, n_skipped: int) -> None:
        self.allocator = allocator
        self.contexts = trace.contexts
        self.context = trace.contexts[0]
        self.stream = 0
        self.n_allocations = 0
        self.live: dict[int, Block] = {}
        self._to_skip = n_skipped
        self._skipped: set[int] = set()

    def play(self, kind: int, number: int) -> None:  # noqa: C901, PLR0912, one branch per kind of event
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
        elif kind == TraceEventKind.POOL_OPTIONS:
            allocator.set_pool_options(number >> 2, no_split=bool(number & 1), use_on_oom=bool(number & 2))
        elif kind == TraceEventKind.DELETE_POOL:
            allocator.delete_pool(number)
        else:
            raise ValueError(f"Unknown kind of event {kind}: the trace was written by a newer version.")

    def skips(self, kind: int, number: int) -> bool:
        """Return whether to skip the next event: one of the first, or the free of a block that these allocated."""
        if kind > TraceEventKind.FREE:
            return False
        if self._to_skip == 0:
            return kind == TraceEventKind.FREE and number in self._skipped
        self._to_skip -= 1
        if kind == TraceEventKind.MALLOC:
            self.n_allocations += 1
            self._skipped.add(self.n_allocations)
        return True

    def _malloc(self, n_bytes: int) -> Block:
        context = self.context
        return self.allocator.malloc(n_bytes, stream=context.stream, pool=context.pool, label=context.label)

    def _try_malloc(self, n_bytes: int) -> None:
        try:
            block = self._malloc(n_bytes)
        except SimulatedOutOfMemory:
            return
        self.allocator.free(block)
