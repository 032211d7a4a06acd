"""Predicts what a planned step needs, by tracing that very step."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.memory_model import ChainPlan
from lightning_memtools.checkpointing.tracing import Cost, Step, tracing


def predict(step: Step, plans: Sequence[ChainPlan]) -> Cost:
    """Peak and operations of a step under a plan; without plans, of the plain step."""
    with tracing(step) as trace, AppliedPlan(trace.model, plans):
        return trace.run()
