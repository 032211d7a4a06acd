"""Counts what the allocator holds: current values, and two peaks."""

# ruff: noqa: PLR1730, as max() takes three times as long as the comparison, at every allocation

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts the memory that the allocator holds, in bytes. A peak is the highest value since the last `reset_peaks`.

    Attributes:
        allocated: The total size of the allocated blocks.
        requested: The total size that was requested for these blocks, before rounding.
        split: The total size of the free blocks that share a segment with others (torch: inactive_split_bytes).
        reserved: The memory that is reserved from the device.
    """

    allocated: int = 0
    requested: int = 0
    split: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0

    def reset_peaks(self) -> None:
        """Set both peaks to the current values."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def add_block(self, size: int, requested: int) -> None:
        """Count a block that was allocated."""
        self.allocated = allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        self.requested += requested

    def remove_block(self, size: int, requested: int) -> None:
        """Count a block that was freed."""
        self.allocated -= size
        self.requested -= requested

    def reserve(self, size: int) -> None:
        """Count memory that was reserved from the device; a negative `size` counts memory released to the device."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
