"""Traces a training step under one plan after the other: the runner knows each peak exactly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan
from lightning_memtools.simulation.step_trace import StepCost, StepTrace, TracedStep, tracing


class PlannedTraces:
    """Steps that are traced under plans. The fake model is made once between entering and leaving this context."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._trace: StepTrace | None = None
        self._of: tuple[TracedStep, Sequence[str]] | None = None

    def cost(
        self, step: TracedStep, plans: Sequence[ChainPlan], heads: Sequence[str] = (), *, offload: bool = False
    ) -> StepCost:
        """Return the memory and operations of a step under a plan, with the loss of `heads` in chunks."""
        if self._trace is None or self._of is None or self._of[0] is not step or self._of[1] != heads:
            self._stack.close()
            self._trace, self._of = self._stack.enter_context(tracing(step)), (step, heads)
            with AppliedPlan(self._trace.model, plans, heads=heads, offload=offload):
                self._trace.run()
        with AppliedPlan(self._trace.model, plans, heads=heads, offload=offload):
            return self._trace.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trace = self._of = None
        self._stack.close()


def predict(step: TracedStep, plans: Sequence[ChainPlan], heads: Sequence[str] = ()) -> StepCost:
    """Return the memory and operations of a step under a plan; without plans, those of the plain step."""
    with PlannedTraces() as traces:
        return traces.cost(step, plans, heads)
