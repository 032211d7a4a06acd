from __future__ import annotations

from lightning_memtools.memory.allocator import (
    AllocationTrace,
    AllocatorConfig,
    CachingAllocator,
    SimulatedOutOfMemory,
    replay,
)

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
    assert result.stats.ooms == 1
    assert result.stats.alloc_retries == 7  # 24 to 48 needed what the one before held; the last try counts with the oom
