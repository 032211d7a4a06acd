"""Everything that was allocated and freed during a step: what for, by whom, and when."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from lightning_memtools._torch import autograd_sequence_number, current_autograd_node, node_sequence_number
from lightning_memtools.memory.allocator import Block, CachingAllocator
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.module_scopes import BACKWARD, OPTIMIZER

WORKSPACE = len(Category)
"""The kind of what libraries take for themselves; all other kinds are a `Category`."""


@dataclass(slots=True)
class Allocation:
    """One block, from when it was given out until it was freed. Events are counted from 0.

    Attributes:
        size: Its size in bytes, as the allocator rounds it.
        born: The event that gave it out.
        step: The step it was made in, from 0; -1 before the first.
        phase: What the step was doing.
        operation: The operator that made it; None where none did.
        kind: A `Category`, or `WORKSPACE`: the last that was known of it.
        module: The module it is charged to.
        node_number: Made in backward, the number of the forward operator whose gradient was being computed.
        died: The event that freed it; None for what was alive at the end.
    """

    size: int
    born: int
    step: int
    phase: str
    operation: Any
    kind: int = Category.OTHER
    module: str = ""
    node_number: int | None = None
    died: int | None = None


class AllocationRecorder:
    """Records what happens on a `VirtualDevice` that it listens to.

    Attributes:
        step: The step that runs, from 0; -1 before the first.
        phase: What it is doing.
        operation: The operator that runs.
        allocations: All allocations by their number in the allocator.
        allocated: Bytes allocated after each event.
        reserved: Bytes reserved after each event.
        marks: The first event of each phase: (event, step, phase).
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.step = -1
        self.phase = "setup"
        self.operation: Any = None
        self.allocations: dict[int, Allocation] = {}
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.marks: list[tuple[int, int, str]] = [(0, -1, "setup")]
        self._allocator = allocator
        # The modules that forward went through, by the number of autograd's next node.
        self._numbers: list[int] = []
        self._places: list[str] = []

    def begin(self, phase: str, step: int | None = None) -> None:
        """A phase begins."""
        if step is not None:
            self.step = step
        self.phase = phase
        self.operation = None
        self.marks.append((len(self.allocated), self.step, phase))

    def on_operator(self, operator: Any) -> None:
        """Note the operator that runs."""
        self.operation = operator

    def on_module(self, place: str) -> None:
        """From now on operators belong to this module."""
        number = autograd_sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._places[-1] = place
        elif not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)

    def place_of_node(self, number: int | None) -> str | None:
        """The module in whose forward an autograd node was made."""
        if number is None:
            return None
        index = bisect_right(self._numbers, number) - 1
        return self._places[index] if index >= 0 else None

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Note an allocation."""
        node = current_autograd_node() if self.phase == "backward" else None
        self.allocations[block.id] = Allocation(
            size=block.size,
            born=len(self.allocated),
            step=self.step,
            phase=self.phase,
            operation=self.operation,
            kind=WORKSPACE if category is None else category,
            module=module,
            node_number=None if node is None else node_sequence_number(node),
        )
        self._note()

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        """Note that a block was freed, and what was known of it last."""
        allocation = self.allocations[block_id]
        allocation.died = len(self.allocated)
        allocation.kind, allocation.module = WORKSPACE if category is None else category, module
        self._note()

    def finish(self, device: VirtualDevice) -> None:
        """Note what all memory is for that is still allocated. The device accounts for nothing afterwards."""
        for entry in device.freeze():
            allocation = self.allocations[entry.block.id]
            allocation.kind, allocation.module = entry.category, entry.module

    def _note(self) -> None:
        self.allocated.append(self._allocator.allocated)
        self.reserved.append(self._allocator.reserved)


def is_passing(allocation: Allocation) -> bool:
    """Whether it is neither kept nor saved: a gradient on its way, or what an optimizer's step needs for a moment."""
    if allocation.kind == Category.ACTIVATION:
        return allocation.module == BACKWARD or allocation.phase in {"clip", "optimizer"}
    # What a step makes and keeps is its state; what is gone when the step ends is not.
    return allocation.kind == Category.OPTIMIZER and allocation.module == OPTIMIZER
