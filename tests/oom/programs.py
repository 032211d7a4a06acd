"""Programs of requests, carried out on simulated allocators until one finds no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory, take_snapshot
from lightning_memtools.memory.allocator import AllocatorHistory as Recorded
from lightning_memtools.memory.allocator.blocks import Block
from lightning_memtools.oom.recorded_history import RecordedHistory

MIB = 2**20
Program = Sequence[tuple[str, int]]
"""("malloc", bytes), ("free", which of those still held, from the oldest), or ("empty", 0)."""


@dataclass
class Run:
    """What became of a program.

    Attributes:
        failed_at: The index of the request that found no memory; None if all did.
        history: What was recorded until then.
        allocator: The allocator in the end.
    """

    failed_at: int | None
    history: RecordedHistory
    allocator: CachingAllocator


def carry_out(program: Program, capacity: int, config: str = "", max_entries: int | None = None) -> Run:
    """Run a program up to the first request without memory."""
    settings = AllocatorConfig.parse(config)
    allocator = CachingAllocator(settings, capacity=capacity)
    recorded = Recorded(max_entries)
    allocator.observe(recorded)
    held: list[Block] = []
    failed_at = None
    for at, (action, number) in enumerate(program):
        if action == "malloc":
            try:
                held.append(allocator.malloc(number))
            except SimulatedOutOfMemory:
                failed_at = at
                break
        elif action == "empty":
            allocator.empty_cache()
        elif held:
            allocator.free(held.pop(number % len(held)))
    return Run(failed_at, RecordedHistory(take_snapshot(allocator, recorded), settings, capacity, 0), allocator)
