"""A device whose memory goes where the test says, with one resettable peak per figure, as real devices have."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_memtools.memory.stats import MemoryStats


class ScriptedDevice:
    """Allocated goes to what `use` says; reserved follows it upwards and never falls."""

    name = "scripted:0"
    simulated = True

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.n_resets = 0
        self._at_peak = 0

    def use(self, *levels: int) -> None:
        """Let allocated pass through these levels, in bytes."""
        for level in levels:
            self.allocated = level
            self.reserved = max(self.reserved, level)
            if level > self.peak_allocated:
                self.peak_allocated = self._at_peak = level
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def stats(self) -> MemoryStats:
        return MemoryStats(
            allocated=self.allocated,
            reserved=self.reserved,
            inactive_split=(self.reserved - self.allocated) // 2,
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
            alloc_retries=0,
            ooms=0,
            capacity=self.capacity,
            device_used=self.reserved + 7,
        )

    def reset_peaks(self) -> None:
        self.n_resets += 1
        self.peak_allocated = self._at_peak = self.allocated
        self.peak_reserved = self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def summary(self) -> str:
        return "a long table"

    def composition_at_peak(self) -> Mapping[str, int]:
        return {"parameters": self._at_peak}
