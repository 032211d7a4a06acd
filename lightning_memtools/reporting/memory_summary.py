"""The summary at the end of a fit, validate, test or predict call: the memory peaks of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_memtools.memory.peaks import STAGES, Stage, StagePeak
from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.reporting.tables import Table, markdown_table


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The peak memory of one run of the Trainer, such as a fit, as tables and remarks.

    Attributes:
        title: A line that names the device, its capacity, and the Trainer method that ran.
        peaks: The highest peak of each stage; with several ranks, the highest of any rank.
        capacity: The memory of the device in bytes; None if unknown.
        remarks: All other information, one line per remark.
    """

    title: str
    peaks: Mapping[Stage, StagePeak]
    capacity: int | None
    remarks: Sequence[str]

    def tables(self) -> list[Table]:
        """Return a table of the peaks by stage and, if known, a table of the highest peak by category of memory."""
        rows = [
            [stage, format_size(peak.allocated), format_size(peak.reserved), format_share(peak.reserved, self.capacity)]
            for stage in STAGES
            if (peak := self.peaks.get(stage)) is not None
        ]
        tables = [Table(["stage", "peak allocated", "peak reserved", "of device"], rows)] if rows else []
        known = [peak for peak in self.peaks.values() if peak.composition]
        if known:
            highest = max(known, key=lambda peak: peak.allocated or 0)
            parts = sorted((highest.composition or {}).items(), key=lambda part: -part[1])
            rows = [[part, format_size(size), format_share(size, highest.allocated)] for part, size in parts if size]
            tables.append(Table(["at the highest peak", "size", "share"], rows))
        return tables

    def markdown(self) -> str:
        """Return the whole summary as markdown, for the report file and the loggers."""
        remarks = "\n".join(f"- {line}" for line in self.remarks)
        return "\n\n".join([f"### {self.title}", *map(markdown_table, self.tables()), remarks]) + "\n"
