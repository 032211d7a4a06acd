"""The summary at the end of a fit, validate, test or predict call: the memory peaks of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_memtools.memory.peaks import STAGES, Stage, StagePeak
from lightning_memtools.memory.processes import GpuProcess, in_words
from lightning_memtools.memory.sizes import format_share, format_size
from lightning_memtools.reporting.console import print_on_console
from lightning_memtools.reporting.tables import Table, console_table, markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Memory figures of one call of the Trainer, as tables and remarks.

    Attributes:
        device: The device's name.
        call: The Trainer's call, such as "fit"; empty where it is not known.
        simulated: Whether the figures are simulated. The device's name then says so and contains the capacity.
        peaks: The highest peak of each stage; with several ranks, the highest of any rank.
        capacity: Bytes of the device, where known.
        alloc_retries: Allocation retries since the run began, where known.
        ooms: Out-of-memory errors since the run began, where known.
        host_rss: Bytes resident in this process at the end.
        processes: Other processes on the device, or why they are not known; None where there is no real device.
        ranks: The number of ranks that the peaks are taken over.
        events: Lines on what happened in the run, such as recoveries from running out of memory.
        note: One more line, such as advice on how to see more.
    """

    device: str
    call: str = ""
    simulated: bool = False
    peaks: Mapping[Stage, StagePeak] = field(default_factory=dict)
    capacity: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    host_rss: int = 0
    processes: Sequence[GpuProcess] | str | None = None
    ranks: int = 1
    events: Sequence[str] = ()
    note: str = ""

    def title(self) -> str:
        """Return one line with the device and its capacity."""
        capacity = f", {format_size(self.capacity)}" if self.capacity is not None and not self.simulated else ""
        ranks = f", highest of {self.ranks} ranks" if self.ranks > 1 else ""
        subject = "Memory peaks" if self.peaks else "Memory"
        return f"{subject} on {self.device}{capacity}{ranks}{f', during {self.call}' if self.call else ''}"

    def stage_table(self) -> Table:
        """Return a table with one row per stage, in the order train, val, test, predict."""
        rows = [
            [stage, format_size(peak.allocated), format_size(peak.reserved), format_share(peak.reserved, self.capacity)]
            for stage in STAGES
            if (peak := self.peaks.get(stage)) is not None
        ]
        return Table(["stage", "peak allocated", "peak reserved", "of device"], rows)

    def composition_table(self) -> Table | None:
        """Return the composition of the highest peak, largest part first; None where it is not known."""
        known = [peak for peak in self.peaks.values() if peak.composition]
        if not known:
            return None
        highest = max(known, key=lambda peak: peak.allocated or 0)
        parts = sorted((highest.composition or {}).items(), key=lambda part: -part[1])
        rows = [
            [category, format_size(n_bytes), format_share(n_bytes, highest.allocated)]
            for category, n_bytes in parts
            if n_bytes > 0
        ]
        return Table(["at the highest peak", "size", "share"], rows)

    def remarks(self) -> list[str]:
        """Return everything else, one line each."""
        lines = [f"Host memory of this process: {format_size(self.host_rss)}."]
        if self.alloc_retries is not None:
            lines.append(f"Allocation retries: {self.alloc_retries}; out-of-memory errors: {self.ooms or 0}.")
        if self.processes is not None:
            lines.append(f"Other processes on the device: {in_words(self.processes)}.")
        lines += self.events
        if self.note:
            lines.append(self.note)
        return lines

    def markdown(self) -> str:
        """Return the whole summary, for the report file and the loggers."""
        parts = [f"### {self.title()}"]
        if self.peaks:
            parts.append(markdown_table(self.stage_table()))
        if composition := self.composition_table():
            parts.append(markdown_table(composition))
        parts.append("\n".join(f"- {line}" for line in self.remarks()))
        return "\n\n".join(parts) + "\n"

    def print(self) -> None:
        """Print the short form."""
        composition = self.composition_table()
        tables = [*([self.stage_table()] if self.peaks else []), *([composition] if composition else [])]
        print_on_console(self.title(), style="bold")
        print_on_console(*map(console_table, tables), *self.remarks())
