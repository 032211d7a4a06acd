"""A checkpoint plan as data, and as a short report in markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import first_of
from lightning_memtools.reporting.tables import shown_as
from lightning_memtools.simulation.tracer import StepCost

_MOST_NAMES = 6


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The layers of a model to recompute in backward, and the predicted memory of a training step that does so.

    Attributes:
        chains: The Sequentials and modules that are recomputed in part or as a whole.
        plain: The memory and operations of the step without the plan.
        planned: The memory and operations of the step with the plan.
        refused: The reason why nothing is recomputed; None if something is.
        notes: Phrases for the report about other effects of the plan, such as a loss computed in chunks.
        heads: The names of the linear layers whose cross-entropy is computed in chunks.
        left_out: For each layer (by name) that may not be recomputed, the reason.
    """

    chains: tuple[ChainPlan, ...]
    plain: StepCost
    planned: StepCost
    refused: str | None = None
    notes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of allocated memory with the plan, in bytes."""
        return self.planned.peak_bytes

    @property
    def plain_peak_bytes(self) -> int:
        """The predicted peak of allocated memory without the plan, in bytes."""
        return self.plain.peak_bytes

    @property
    def extra_operations(self) -> float:
        """The fraction of operations that the plan adds to a step: 0.25 means a quarter more than without it."""
        return self.planned.operations / self.plain.operations - 1 if self.plain.operations else 0.0

    def apply(self, module: nn.Module) -> AppliedPlan:
        """Apply the plan to the module that it was made for, or to another module with the same structure.

        To undo the plan, call `remove()` on the returned handle, or use the handle in a `with` statement. Recomputed
        layers run two more times at their first call, to check that the values are the same bit for bit.
        """
        return AppliedPlan(module, self.chains, heads=self.heads, prove=True)

    def recomputed(self, most: int = _MOST_NAMES) -> str:
        """Return the names of at most `most` recomputed modules, such as "blocks.0-40, head.mlp", or "nothing"."""
        names = [layer for chain in self.chains for one in chain.ranges for layer in chain.layers[one.start : one.stop]]
        return first_of(collapsed(names), most) or "nothing"

    def figures(self, measured_bytes: int | None = None) -> list[str]:
        """Return lines of text on the memory saved, the extra operations, and the measured peak (if given)."""
        plain, planned = self.plain, self.planned
        before, after = format_size(plain.activation_bytes), format_size(planned.activation_bytes)
        peak_before, peak_after = format_size(plain.peak_bytes), format_size(planned.peak_bytes)
        lines = [
            f"activation memory: {before} before, {after} after",
            f"extra computation: {self.extra_operations:.1%}",
            *self.notes,
            f"predicted peak (simulated): {peak_before} before, {peak_after} after",
        ]
        if measured_bytes is not None:
            off = measured_bytes / planned.peak_bytes - 1
            lines.append(f"measured peak: {format_size(measured_bytes)} ({off:+.1%} from the predicted one)")
        return lines

    def sentence(self) -> str:
        """Return a sentence on what is recomputed, or on why nothing is."""
        if self.refused is not None:
            return f"Nothing is recomputed. {self.refused}"
        return f"Recompute {self.recomputed()}; keep the others."

    def page(self, measured_bytes: int | None = None) -> str:
        """Return the plan in markdown: the recomputed layers, the memory and operations, and the layers left out."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            by_reason.setdefault(why, []).append(name)
        lines = [
            *self.figures(measured_bytes),
            *(f"left out: {first_of(collapsed(names), _MOST_NAMES)} ({why})" for why, names in by_reason.items()),
        ]
        parts = ["# Gradient checkpointing", self.sentence(), "\n".join(f"- {line}" for line in lines)]
        return "\n\n".join(filter(None, parts)) + "\n"

    def __str__(self) -> str:
        return self.page()

    _repr_html_ = shown_as(__str__)


def collapsed(names: Iterable[str]) -> list[str]:
    """Return module names with consecutive numbers merged into ranges, such as "blocks.0-40.mlp"."""
    found = [tuple(name.split(".")) if name else ("the model",) for name in names]
    for place in range(max(map(len, found), default=0) - 1, -1, -1):  # the last number of a name tells most
        alike: dict[tuple[Any, ...], list[str]] = {}
        for parts in found:
            is_number = place < len(parts) and parts[place].isdigit()
            key = (parts[:place], parts[place + 1 :]) if is_number else (parts, None)
            alike.setdefault(key, []).append(parts[place] if is_number else "")
        found = [
            before if after is None else (*before, span, *after)
            for (before, after), numbers in alike.items()
            for span in (_spans(numbers) if after is not None else [""])
        ]
    return [".".join(parts) for parts in found]


def _spans(numbers: Iterable[str]) -> list[str]:
    rows: list[list[int]] = []
    for number in sorted(set(map(int, numbers))):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return [f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows]
