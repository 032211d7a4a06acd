"""Counts what the allocator holds: current values, peaks and running totals."""

# ruff: noqa: PLR1730, as max() takes three times as long as the comparison, at every allocation

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """The memory in the small pools, the large pools, or all of them: sizes in bytes, numbers of blocks and segments.

    ``peak_...`` is the highest value since the last `reset_peaks`, ``total_...`` the sum of all increases.

    Attributes:
        blocks: The number of allocated blocks.
        allocated: Their sizes.
        requested: The sizes requested for them.
        split_blocks: The number of free blocks that share a segment with others.
        split: Their sizes (torch: inactive_split_bytes).
        segments: The number of segments held of the device; as in torch, without expandable segments.
        reserved: The memory held of the device.
    """

    blocks: int = 0
    allocated: int = 0
    requested: int = 0
    split_blocks: int = 0
    split: int = 0
    segments: int = 0
    reserved: int = 0
    peak_blocks: int = 0
    peak_allocated: int = 0
    peak_requested: int = 0
    peak_split_blocks: int = 0
    peak_split: int = 0
    peak_segments: int = 0
    peak_reserved: int = 0
    total_blocks: int = 0
    total_allocated: int = 0
    total_requested: int = 0
    total_split_blocks: int = 0
    total_split: int = 0
    total_segments: int = 0
    total_reserved: int = 0

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        self.peak_blocks = self.blocks
        self.peak_allocated = self.allocated
        self.peak_requested = self.requested
        self.peak_split_blocks = self.split_blocks
        self.peak_split = self.split
        self.peak_segments = self.segments
        self.peak_reserved = self.reserved

    def add_block(self, size: int, requested: int) -> None:
        """Count a block that was allocated."""
        self.blocks = blocks = self.blocks + 1
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks
        self.allocated = allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        self.requested = asked = self.requested + requested
        if asked > self.peak_requested:
            self.peak_requested = asked
        self.total_blocks += 1
        self.total_allocated += size
        self.total_requested += requested

    def remove_block(self, size: int, requested: int) -> None:
        """Count a block that was freed."""
        self.blocks -= 1
        self.allocated -= size
        self.requested -= requested

    def add_split(self, blocks: int, size: int) -> None:
        """Count more free blocks in split segments, or fewer with negative numbers."""
        self.split += size
        if size > 0:
            self.total_split += size
            if self.split > self.peak_split:
                self.peak_split = self.split
        if blocks:
            self.split_blocks += blocks
            if blocks > 0:
                self.total_split_blocks += blocks
                if self.split_blocks > self.peak_split_blocks:
                    self.peak_split_blocks = self.split_blocks

    def add_reserved(self, segments: int, size: int) -> None:
        """Count memory that was reserved from the device."""
        self.reserved += size
        self.total_reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments += segments
        self.total_segments += segments
        self.peak_segments = max(self.peak_segments, self.segments)

    def remove_reserved(self, segments: int, size: int) -> None:
        """Count memory that was released to the device."""
        self.reserved -= size
        self.segments -= segments

    def as_torch_names(self) -> dict[str, int]:
        """Return the values by their names in ``torch.cuda.memory_stats`` without the pool: "allocated_bytes.peak".

        Blocks that wait for another stream are not simulated, so the active blocks are the allocated ones.
        """
        blocks = self.blocks, self.peak_blocks, self.total_blocks
        sizes = self.allocated, self.peak_allocated, self.total_allocated
        rows = {
            "allocation": blocks,
            "segment": (self.segments, self.peak_segments, self.total_segments),
            "active": blocks,
            "inactive_split": (self.split_blocks, self.peak_split_blocks, self.total_split_blocks),
            "allocated_bytes": sizes,
            "reserved_bytes": (self.reserved, self.peak_reserved, self.total_reserved),
            "active_bytes": sizes,
            "inactive_split_bytes": (self.split, self.peak_split, self.total_split),
            "requested_bytes": (self.requested, self.peak_requested, self.total_requested),
        }
        return {
            f"{metric}.{kind}": value
            for metric, (current, peak, total) in rows.items()
            for kind, value in (("current", current), ("peak", peak), ("allocated", total), ("freed", total - current))
        }
