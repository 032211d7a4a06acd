"""Memory after every event of the traced steps, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.simulation.recording import WORKSPACE, Allocation, AllocationRecorder, is_passing

PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace", "other")
"""The categories of an estimate."""

_PART_OF = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    WORKSPACE: "workspace",
}


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The history of a trace; an event is the allocation or the freeing of one block.

    Attributes:
        parts: For each of `PARTS`, its bytes after every event. They add up to ``allocated``.
        allocated: Bytes allocated after every event.
        reserved: Bytes reserved after every event.
        marks: The beginnings of phases: (event, step counted from 1, phase).
        peak: The first event at which ``allocated`` is highest.
    """

    parts: dict[str, list[int]]
    allocated: Sequence[int]
    reserved: Sequence[int]
    marks: Sequence[tuple[int, int, str]]
    peak: int

    def at(self, event: int) -> dict[str, int]:
        """Return the bytes of each part after an event."""
        return {name: sizes[event] for name, sizes in self.parts.items()}


def part_of(allocation: Allocation) -> str:
    """Return which of `PARTS` a block belongs to."""
    if is_passing(allocation):
        return "temporaries"
    return _PART_OF.get(allocation.kind, "other")


def timeline_of(recorder: AllocationRecorder) -> MemoryTimeline:
    """Return the timeline of a recorder's allocations."""
    n_events = len(recorder.allocated)
    changes = {name: [0] * (n_events + 1) for name in PARTS}
    for allocation in recorder.allocations.values():
        change = changes[part_of(allocation)]
        change[allocation.born] += allocation.size
        change[n_events if allocation.died is None else allocation.died] -= allocation.size
    parts = {}
    for name, change in changes.items():
        total, sizes = 0, []
        for delta in change[:n_events]:
            total += delta
            sizes.append(total)
        parts[name] = sizes
    peak = max(range(n_events), key=recorder.allocated.__getitem__) if n_events else 0
    marks = [(event, step + 1, phase) for event, step, phase in recorder.marks]
    return MemoryTimeline(parts, recorder.allocated, recorder.reserved, marks, peak)
