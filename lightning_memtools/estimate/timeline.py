"""Memory after every event, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.simulation.recording import WORKSPACE, Allocation, Recorder, is_passing

PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace", "other")
"""What an estimate distinguishes."""

_PART_OF = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    WORKSPACE: "workspace",
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """The history of a trace; an event is one block given out or freed.

    Attributes:
        parts: For each of `PARTS`, its bytes after every event. They add up to ``allocated``.
        allocated: Bytes allocated after every event.
        reserved: Bytes reserved after every event.
        marks: Where phases begin: (event, step counted from 1, phase).
        peak: The event at which allocated was highest first.
    """

    parts: dict[str, list[int]]
    allocated: Sequence[int]
    reserved: Sequence[int]
    marks: Sequence[tuple[int, int, str]]
    peak: int

    def at(self, event: int) -> dict[str, int]:
        """Bytes of each part after an event."""
        return {name: sizes[event] for name, sizes in self.parts.items()}


def part_of(allocation: Allocation) -> str:
    """Which of `PARTS` a block belongs to."""
    if is_passing(allocation):
        return "temporaries"
    return _PART_OF.get(allocation.kind, "other")


def timeline_of(recorder: Recorder) -> Timeline:
    """Put a recorder's allocations in the order of events."""
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
    return Timeline(parts, recorder.allocated, recorder.reserved, marks, peak)
