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
        """Set the peaks of allocated and reserved memory to the current values."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def add_block(self, size: int, requested: int) -> None:
        """Add an allocated block to the totals."""
        self.allocated = allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        self.requested += requested

    def remove_block(self, size: int, requested: int) -> None:
        """Subtract a freed block from the totals."""
        self.allocated -= size
        self.requested -= requested

    def reserve(self, size: int) -> None:
        """Add memory that was reserved from the device to the total; a negative `size` is memory that was released."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
