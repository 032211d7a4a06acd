"""The requests of traced steps, made of an allocator that holds the model already."""

from __future__ import annotations

from lightning_memtools.memory.allocator import AllocationTrace, Block, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.allocator.allocation_trace import TraceEventKind


def run_on(allocator: CachingAllocator, trace: AllocationTrace, n_before: int) -> bool:
    """Make a trace's requests of an allocator; whether all find memory.

    Args:
        allocator: What to ask; it is left as the requests leave it.
        trace: The requests.
        n_before: How many of its first allocations and frees are left out: those that put the model on the device.
    """
    live: dict[int, Block] = {}
    context = trace.contexts[0]
    n_allocations = n_events = 0
    for kind, number in trace.events():
        if kind == TraceEventKind.CONTEXT:
            context = trace.contexts[number]
        elif kind == TraceEventKind.MALLOC:
            n_allocations += 1
            n_events += 1
            if n_events <= n_before:
                continue
            try:
                live[n_allocations] = allocator.malloc(
                    number, stream=context.stream, pool=context.pool, label=context.label
                )
            except SimulatedOutOfMemory:
                return False
        elif kind == TraceEventKind.FREE:
            n_events += 1
            if number in live:  # what was there before stays
                allocator.free(live.pop(number))
    return True
