"""Estimates at other batch sizes without tracing: every allocation of a step is a straight line over the batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_memtools.estimate.result import MemoryEstimate
from lightning_memtools.memory.allocator import Trace, replay
from lightning_memtools.memory.allocator.trace import Kind


def line_through(one: MemoryEstimate, other: MemoryEstimate) -> Callable[[int], MemoryEstimate] | None:
    """The estimate of the same step as a function of the batch size, from its traces at two sizes.

    Each allocation has the size that is on the line through its two sizes: what tensors of batch times something have.
    Workspaces that a kernel rounds in steps of its own, and what grows with the square of the batch, are off that line.
    What this gives is carried out on a new allocator, so rounding and fragmentation are those of the batch size asked
    for. Only what tells whether it fits is right: peaks, and `fits`; composition, modules and timeline are those of
    ``one``.

    Returns:
        None where no line can be drawn: the sizes are the same, or the steps do not make the same requests in the same
        order.
    """
    a, b = one.batch_size, other.batch_size
    if a is None or b is None or a == b or one.trace is None or other.trace is None:
        return None
    first, second = one.trace, other.trace
    if len(first) != len(second) or first.contexts != second.contexts:
        return None
    for (kind, number), (other_kind, other_number) in zip(first.events(), second.events(), strict=True):
        if kind != other_kind or (kind != Kind.MALLOC and number != other_number):
            return None

    def at(size: int) -> MemoryEstimate:
        trace = Trace(first.config, capacity=first.capacity, used_by_others=first.used_by_others)
        trace.contexts = first.contexts
        for (kind, number), (_, other_number) in zip(first.events(), second.events(), strict=True):
            if kind == Kind.MALLOC:
                on_line = number + -((other_number - number) * (a - size) // (b - a))  # rounded up
                trace.add(Kind.MALLOC, max(on_line, 1))
            else:
                trace.add(Kind(kind), number)
        stats = replay(trace).stats
        assert stats.peak_allocated is not None
        assert stats.peak_reserved is not None
        return replace(
            one,
            peak_allocated=stats.peak_allocated,
            peak_reserved=stats.peak_reserved,
            batch_size=size,
            _trace=trace,
        )

    return at
