from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_memtools.memory.allocator import AllocationTrace, AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.allocator.allocation_trace import AllocationContext, TraceEventKind

MIB = 2**20


def recorded() -> CachingAllocator:
    """One event of every kind."""
    allocator = CachingAllocator(capacity=100 * MIB, used_by_others=MIB, record=True)
    first = allocator.malloc(600, label="weight")
    second = allocator.malloc(12 * MIB, stream=3, pool=1, label="activation")
    allocator.record_stream(second, 4)
    allocator.free(second)
    allocator.synchronize(4)
    allocator.synchronize()
    allocator.release_pool(1)
    allocator.empty_cache()
    allocator.used_by_others = 2 * MIB
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
        (TraceEventKind.STREAM, 4),
        (TraceEventKind.RECORD_STREAM, 2),
        (TraceEventKind.FREE, 2),
        (TraceEventKind.STREAM, 4),
        (TraceEventKind.SYNCHRONIZE, 1),
        (TraceEventKind.SYNCHRONIZE, 0),
        (TraceEventKind.RELEASE_POOL, 1),
        (TraceEventKind.EMPTY_CACHE, 0),
        (TraceEventKind.USED_BY_OTHERS, 2 * MIB),
        (TraceEventKind.CONTEXT, 3),
        (TraceEventKind.FAILED_MALLOC, 100 * MIB),
        (TraceEventKind.RESET_PEAKS, 0),
        (TraceEventKind.FREE, 1),
    ]
    assert trace.contexts == [
        AllocationContext(),
        AllocationContext(0, 0, "weight"),
        AllocationContext(3, 1, "activation"),
        AllocationContext(0, 0, "too much"),
    ]


def test_a_saved_trace_is_the_same_when_loaded(tmp_path):
    config = AllocatorConfig.parse("max_split_size_mb:64,roundup_power2_divisions:4")
    trace = recorded().trace
    trace.config = config
    trace.save(tmp_path / "trace.json")
    loaded = AllocationTrace.load(tmp_path / "trace.json")
    assert (loaded.config, loaded.capacity, loaded.used_by_others) == (config, 100 * MIB, MIB)
    assert loaded.contexts == trace.contexts
    assert list(loaded.events()) == list(trace.events())


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
