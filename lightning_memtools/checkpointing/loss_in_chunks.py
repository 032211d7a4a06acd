"""Traces a step with its loss computed in chunks, to see whether that lowers the peak."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.loss_head import possible_heads
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.simulation.tracer import StepCost, StepRequest, tracing


@dataclass(frozen=True, slots=True)
class LossInChunks:
    """A training step in which cross-entropy can be computed in chunks, and what that saves.

    Attributes:
        names: The names of the linear layers whose output only cross-entropy reads.
        logits: For the largest logits: the number of predictions, the number of classes, and the bytes of a copy.
        chunk_rows: The number of rows of the largest logits that are computed at a time.
        read_by: The function that reads the largest logits and so rules out chunks; "" if only cross-entropy does.
        plain: The memory and operations of the step as it is.
        cost: The memory and operations with the loss in chunks.
    """

    names: tuple[str, ...]
    logits: tuple[int, int, int]
    chunk_rows: int
    read_by: str
    plain: StepCost
    cost: StepCost

    def saves(self, least: float) -> bool:
        """Return True if computing the loss in chunks lowers the peak by more than the fraction `least`."""
        return bool(self.names) and self.cost.peak_bytes < (1 - least) * self.plain.peak_bytes

    @property
    def size(self) -> str:
        """The dimensions and bytes of the logits, as a phrase for messages."""
        rows, classes, n_bytes = self.logits
        return f"the logits ({rows:,} x {classes:,}) take {format_size(n_bytes)} for each copy"


def loss_in_chunks(step: StepRequest) -> LossInChunks | None:
    """Trace a step with its loss computed in chunks, and return what that saves; None if it is impossible.

    The logits must come from a linear layer with at least 1,024 outputs, and reach cross-entropy only through changes
    of dtype or shape and elementwise operations.

    Raises:
        Exception: Whatever the step raises on fake tensors.
    """
    names = possible_heads(step.model)
    if not names:
        return None
    with tracing(step) as trace, AppliedPlan(trace.model, (), heads=names) as applied:
        trace.run()
        found = {name: head for name, head in applied.heads.items() if head.n_losses}
        if not found:
            return None
        for name, head in applied.heads.items():
            head.is_off |= name not in found
        cost = trace.run()
        names = [name for name, head in found.items() if not head.is_off]
        largest = max(found.values(), key=lambda head: head.logits[2])
        for head in found.values():
            head.is_off = True
        plain = trace.run()
    return LossInChunks(tuple(names), largest.logits, largest.chunk_rows, largest.read_by, plain, cost)
