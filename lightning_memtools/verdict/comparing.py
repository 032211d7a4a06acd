"""Compares the summaries of two runs, and checks that the second does not exceed limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.tables import Table

PEAK, STEP_TIME = "peak allocated", "step time"
_SHOWN = {"bytes": format_size, "share": "{:.0%}".format, "ms": "{:.4g} ms".format}


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure of both runs.

    Attributes:
        name: The name of the figure.
        unit: "bytes", "ms" or "share"; "" without a unit.
        before: The value in the first run; None if unknown.
        after: The value in the second run; None if unknown.
    """

    name: str
    unit: str
    before: Any
    after: Any

    @property
    def increase(self) -> float | None:
        """The increase of bytes or time as a share of the first value; None if unknown."""
        if self.unit not in {"bytes", "ms"} or self.after is None or not self.before:
            return None
        return float(self.after / self.before - 1)

    def row(self) -> list[str]:
        """Return the figure as a row of a table."""
        show = _SHOWN.get(self.unit, str)
        values = ["?" if value is None else show(value) for value in (self.before, self.after)]
        return [self.name, *values, "" if self.increase is None else f"{self.increase:+.1%}"]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Return all figures of two summaries, also those that only one of them has."""
    one, other = _figures(before), _figures(after)
    names = dict.fromkeys([*one, *other])
    return [FigureChange(name, unit, one.get((name, unit)), other.get((name, unit))) for name, unit in names]


def _figures(summary: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the values of a summary by name and unit."""
    memory, times = summary["memory"], summary["time"]
    return {
        ("verdict", ""): summary["verdict"]["limit"],
        ("device", ""): summary["run"]["device"],
        ("ranks", ""): len(summary["ranks"]),
        ("batch size", ""): summary["batch_size"],
        (PEAK, "bytes"): memory["peak_allocated_bytes"],
        ("peak reserved", "bytes"): memory["peak_reserved_bytes"],
        **{(f"at peak: {part}", "bytes"): size for part, size in (memory["composition_bytes"] or {}).items()},
        (STEP_TIME, "ms"): times["step_ms"],
        **{(f"time: {phase}", "share"): share for phase, share in times["shares"].items()},
    }


def table_of(changes: Sequence[FigureChange]) -> Table:
    """Return a table with one row per figure."""
    return Table(("", "before", "after", "change"), [change.row() for change in changes])


def exceeded(changes: Sequence[FigureChange], limits: Mapping[str, float]) -> list[str]:
    """Return a line for each figure that has increased by more than its limit, or is unknown.

    Args:
        changes: The figures.
        limits: The largest increase of each figure, as a share of the first run's.
    """
    lines = []
    for change in changes:
        most, increase = limits.get(change.name), change.increase
        if most is not None and increase is None:
            lines.append(f"{change.name} is not known in both runs, so it cannot be held to {most:+.1%}.")
        elif most is not None and increase is not None and increase > most:
            _, before, after, rise = change.row()
            lines.append(f"{change.name} rose by {rise}, from {before} to {after}; {most:+.1%} is allowed.")
    return lines
