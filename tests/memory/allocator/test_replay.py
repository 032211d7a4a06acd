from __future__ import annotations

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
    assert result.label == "batch of 52"
    # Eight batches, 20 to 48, of three events each, and the label of the ninth.
    assert result.n_events == 25
    assert result.stats.ooms == 1
    assert result.stats.alloc_retries == 7  # 24 to 48 needed what the one before held; the last try counts with the oom


def test_the_recorded_capacity_holds_unless_another_is_given() -> None:
    allocator = CachingAllocator(capacity=40 * MIB, record=True)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.free(allocator.malloc(36 * MIB))
    assert allocator.trace is not None
    assert replay(allocator.trace).stats.alloc_retries == 1
    assert replay(allocator.trace, capacity=None).stats.alloc_retries == 0
    assert replay(allocator.trace, capacity=None).stats.peak_reserved == 66 * MIB


def test_a_recorded_failure_that_succeeds_in_the_replay_is_freed_at_once() -> None:
    allocator = CachingAllocator(capacity=40 * MIB, record=True)
    kept = allocator.malloc(20 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(30 * MIB)
    allocator.malloc(10 * MIB)
    allocator.free(kept)
    assert allocator.trace is not None
    same = replay(allocator.trace)
    assert (same.completed, same.stats.ooms, same.allocator.allocated) == (True, 1, 10 * MIB)
    larger = replay(allocator.trace, capacity=80 * MIB)
    assert (larger.stats.ooms, larger.stats.peak_allocated, larger.allocator.allocated) == (0, 50 * MIB, 10 * MIB)


def test_an_unknown_kind_of_event_is_an_error() -> None:
    trace = growing_batches()
    trace.add(max(TraceEventKind) + 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"Unknown kind of event {max(TraceEventKind) + 1}"):
        replay(trace)
