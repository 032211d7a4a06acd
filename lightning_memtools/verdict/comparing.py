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
    """A quantity, such as the peak memory, with its values in two runs.

    Attributes:
        name: The name of the quantity.
        unit: "bytes", "ms", or "share" for a fraction; "" if there is none.
        before: The value in the first run; None if unknown.
        after: The value in the second run; None if unknown.
    """

    name: str
    unit: str
    before: Any
    after: Any

    @property
    def increase(self) -> float | None:
        """The relative increase, such as 0.1 for 10%; None if a value is unknown or is neither in bytes nor in ms."""
        if self.unit not in {"bytes", "ms"} or self.after is None or not self.before:
            return None
        return float(self.after / self.before - 1)

    def row(self) -> list[str]:
        """Return the row of a table: the name, the two values and the increase, as strings."""
        show = _SHOWN.get(self.unit, str)
        values = ["?" if value is None else show(value) for value in (self.before, self.after)]
        return [self.name, *values, "" if self.increase is None else f"{self.increase:+.1%}"]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Return the quantities in two run summaries, each with both values. A value missing in one summary is None."""
    one, other = _figures(before), _figures(after)
    names = dict.fromkeys([*one, *other])
    return [FigureChange(name, unit, one.get((name, unit)), other.get((name, unit))) for name, unit in names]


def _figures(summary: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the quantities of a run's summary that can be compared, as a dict from (name, unit) to the value."""
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
    """Return a table with one row per quantity: its value before and after, and the change."""
    return Table(("", "before", "after", "change"), [change.row() for change in changes])


def exceeded(changes: Sequence[FigureChange], limits: Mapping[str, float]) -> list[str]:
    """Return a line of text for each quantity that grew beyond its limit, or that has a limit but is unknown.

    Args:
        changes: The quantities, with their values in the two runs.
        limits: The largest allowed increase of each quantity, by name, as a fraction of the first run's value.
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
