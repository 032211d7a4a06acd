from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_memtools.memory.allocator import AllocationTrace, AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
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
