"""Records every allocation of a step with its purpose, its module, and when it was made and freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_memtools._torch import autograd_sequence_number, current_autograd_node, node_sequence_number
from lightning_memtools.memory.allocator import Block, CachingAllocator
from lightning_memtools.memory.optimizer_lines import OptimizerLines
from lightning_memtools.memory.user_code import CodeLine, line_that_allocates
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.ledger import DeviceListener
from lightning_memtools.memory.virtual.module_scopes import BACKWARD, OPTIMIZER

WORKSPACE = len(Category)
"""The kind of a library's workspace; every other kind is a `Category`."""


@dataclass(slots=True)
class Allocation:
    """One block of memory, from allocation to free. Events (allocations and frees) are numbered from 0.

    Attributes:
        size: Its size in bytes, as the allocator rounds it.
        born: The event that allocated it.
        step: The step that allocated it, from 0; -1 before the first.
        phase: The phase of the step.
        operation: The operator that allocated it; None if no operator did.
        kind: The last known `Category` of its contents, such as parameter or gradient, or `WORKSPACE`.
        module: The name of the module that the memory is attributed to.
        node_number: In backward, the sequence number of the autograd node that was running.
        line: The line of code that asked for it; None if it is not known.
        died: The event that freed it; None if it was never freed.
    """

    size: int
    born: int
    step: int
    phase: str
    operation: Any
    kind: int = Category.OTHER
    module: str = ""
    node_number: int | None = None
    line: str | CodeLine | None = None
    died: int | None = None

    def lives_at(self, event: int) -> bool:
        """Return whether the block is allocated right after the event with this number."""
        return self.born <= event and (self.died is None or self.died > event)


class AllocationRecorder(DeviceListener):
    """Records the allocations on a `VirtualDevice`, a simulated GPU. Events (allocations and frees) are numbered.

    Attributes:
        step: The current step, from 0; -1 before the first.
        phase: The current phase.
        operation: The current operator.
        allocations: All allocations, by the id that the allocator gave the block.
        allocated: Bytes allocated after each event.
        marks: The first event of each phase: (event, step, phase).
        lines: A context manager that records which line of code made each optimizer. Enter it while the steps run.
        stop_at: A file name. The search up the stack for the line that allocates ends at the first frame in this file.
    """

    def __init__(self, allocator: CachingAllocator, stop_at: str = "") -> None:
        self.lines, self.stop_at = OptimizerLines(), stop_at
        self.step = -1
        self.phase = "setup"
        self.operation: Any = None
        self.allocations: dict[int, Allocation] = {}
        self.allocated: list[int] = []
        self.marks: list[tuple[int, int, str]] = [(0, -1, "setup")]
        self._allocator = allocator
        # By the sequence number of the next autograd node: the module that was entered or left last before it.
        self._places: dict[int, str] = {}

    @property
    def peak(self) -> int:
        """The number of the first event after which the allocated memory is at its maximum."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__, default=0)

    def begin(self, phase: str, step: int | None = None) -> None:
        """Record that a phase begins."""
        if step is not None:
            self.step = step
        self.phase = phase
        self.operation = None
        self.marks.append((len(self.allocated), self.step, phase))

    def on_operator(self, operator: Any) -> None:
        """Record that an operator runs."""
        self.operation = operator

    def on_module(self, place: str) -> None:
        """Record that the module named `place` begins to run. The operators that follow belong to it."""
        self._places[autograd_sequence_number()] = place

    def place_of_node(self, number: int | None) -> str | None:
        """Return the name of the module whose forward created the autograd node `number`; None if unknown."""
        before = [one for one in self._places if number is not None and one <= number]
        return self._places[max(before)] if before else None

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Record that a block was allocated, with the category of its contents and the module they belong to."""
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
            line=self._line(),
        )
        self.allocated.append(self._allocator.allocated)

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        """Record that a block was freed, with the last known category of its contents and the module they belong to."""
        allocation = self.allocations[block_id]
        allocation.died = len(self.allocated)
        allocation.kind, allocation.module = WORKSPACE if category is None else category, module
        self.allocated.append(self._allocator.allocated)

    def finish(self, device: VirtualDevice) -> None:
        """Record the category and module of all memory that is still allocated, and make the device stop tracking."""
        for entry in device.freeze():
            allocation = self.allocations[entry.block.id]
            allocation.kind, allocation.module = entry.category, entry.module

    def _line(self) -> str | CodeLine | None:
        known = line_that_allocates(stop_at=self.stop_at)
        # A step also runs forward and backward, where it is given them as a closure.
        return known or (self.lines.running if self.phase == "optimizer" else None)


def is_passing(allocation: Allocation) -> bool:
    """Return whether an allocation is temporary: a gradient in backward, or scratch memory of the optimizer."""
    if allocation.kind == Category.ACTIVATION:
        return allocation.module == BACKWARD or allocation.phase in {"clip", "optimizer"}
    # State that the step keeps has been charged to the module of its parameter by the end of the trace.
    return allocation.kind == Category.OPTIMIZER and allocation.module == OPTIMIZER
