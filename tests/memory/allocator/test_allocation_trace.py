from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_memtools.memory.allocator import (
    AllocationTrace,
    AllocatorConfig,
    CachingAllocator,
    SimulatedOutOfMemory,
    replay,
)
from lightning_memtools.memory.allocator.allocation_trace import TraceEventKind

MIB = 2**20


def recorded() -> CachingAllocator:
    """One event of every kind."""
    allocator = CachingAllocator(capacity=100 * MIB, used_by_others=MIB, record=True)
    first = allocator.malloc(600, label="weight")
    allocator.free(allocator.malloc(12 * MIB, stream=3, label="activation"))
    allocator.empty_cache()
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(100 * MIB, label="too much")
    allocator.reset_peaks()
    allocator.free(first)
    return allocator


def test_events_are_recorded_in_order_with_allocations_by_number():
    trace = recorded().trace
    assert list(trace.events()) == [
        (TraceEventKind.CONTEXT, 1),
        (TraceEventKind.MALLOC, 600),
        (TraceEventKind.CONTEXT, 2),
        (TraceEventKind.MALLOC, 12 * MIB),
        (TraceEventKind.FREE, 2),
        (TraceEventKind.EMPTY_CACHE, 0),
        (TraceEventKind.CONTEXT, 3),
        (TraceEventKind.FAILED_MALLOC, 100 * MIB),
        (TraceEventKind.RESET_PEAKS, 0),
        (TraceEventKind.FREE, 1),
    ]
    assert trace.contexts == [(0, None), (0, "weight"), (3, "activation"), (0, "too much")]


def trace_of(*sizes: int, labels: tuple[str, ...] = ("a", "a")) -> AllocationTrace:
    allocator = CachingAllocator(AllocatorConfig(), record=True)
    blocks = [allocator.malloc(size, label=label) for size, label in zip(sizes, labels, strict=True)]
    for block in blocks:
        allocator.free(block)
    assert allocator.trace is not None
    return allocator.trace


def test_a_trace_between_two_or_beyond_them_has_sizes_in_proportion() -> None:
    four, eight = trace_of(1000, 4 * 300 + 7), trace_of(1000, 8 * 300 + 7)
    assert four.has_same_events(eight)
    for n in (1, 4, 5, 8, 1000):
        expected = list(trace_of(1000, n * 300 + 7).events())
        assert list(four.extrapolated(eight, Fraction(n - 4, 4)).events()) == expected
    # Where sizes are no whole numbers, too much is better than too little.
    assert [number for _, number in four.extrapolated(eight, Fraction(1, 1000)).events()][1:3] == [1000, 1209]


def growing_batches() -> AllocationTrace:
    """Batches of 20, 24, ... MiB, one after the other."""
    allocator = CachingAllocator(record=True)
    for size in range(20, 60, 4):
        allocator.free(allocator.malloc(size * MIB, label=f"batch of {size}"))
    assert allocator.trace is not None
    return allocator.trace


def test_a_replay_under_other_settings_shows_their_effect() -> None:
    trace = growing_batches()
    as_recorded = replay(trace)
    assert as_recorded.stats.peak_reserved == sum(range(20, 60, 4)) * MIB
    expandable = replay(trace, config=AllocatorConfig(expandable_segments=True))
    assert expandable.completed
    assert expandable.stats.peak_reserved == 60 * MIB
    assert expandable.stats.peak_allocated == as_recorded.stats.peak_allocated == 56 * MIB


def test_a_smaller_device_shows_where_memory_runs_out() -> None:
    result = replay(growing_batches(), capacity=50 * MIB)
    assert not result.completed
    assert isinstance(result.out_of_memory, SimulatedOutOfMemory)
    assert result.out_of_memory.requested == 52 * MIB
    assert result.stats.ooms == 1
    assert result.stats.alloc_retries == 7  # 24 to 48 needed what the one before held; the last try counts with the oom
