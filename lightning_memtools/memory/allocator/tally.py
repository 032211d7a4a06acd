"""Counting what the allocator holds: current values, peaks and running totals."""

# ruff: noqa: PLR1730, as max() takes three times as long as the comparison, at every allocation

from __future__ import annotations


class Count:
    """A counter with its current value, its highest value, and the total of all additions."""

    __slots__ = ("current", "peak", "total")

    def __init__(self) -> None:
        self.current = self.peak = self.total = 0

    def add(self) -> None:
        """Count one more."""
        self.current += 1
        self.total += 1
        self.peak = max(self.peak, self.current)

    def remove(self) -> None:
        """Count one less."""
        self.current -= 1

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.current

    def as_torch_names(self) -> dict[str, int]:
        """Return the values by their names in ``torch.cuda.memory_stats``."""
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.total,
            "freed": self.total - self.current,
        }


class Tally:
    """The memory in the small pools, the large pools, or all of them: sizes in bytes, numbers of blocks and segments.

    ``peak_...`` is the highest value since the last `reset_peaks`, ``total_...`` the sum of all increases.

    Attributes:
        blocks: The number of allocated blocks.
        allocated: Their sizes.
        requested: The sizes requested for them, and for blocks that wait for another stream.
        waiting_blocks: The number of freed blocks that wait for another stream.
        waiting: Their sizes.
        split_blocks: The number of free blocks that share a segment with others.
        split: Their sizes (torch: inactive_split_bytes).
        segments: The number of segments held of the device; as in torch, without expandable segments.
        reserved: The memory held of the device.
    """

    __slots__ = (
        "allocated",
        "blocks",
        "peak_active",
        "peak_active_blocks",
        "peak_allocated",
        "peak_blocks",
        "peak_requested",
        "peak_reserved",
        "peak_segments",
        "peak_split",
        "peak_split_blocks",
        "requested",
        "reserved",
        "segments",
        "split",
        "split_blocks",
        "total_allocated",
        "total_blocks",
        "total_requested",
        "total_reserved",
        "total_segments",
        "total_split",
        "total_split_blocks",
        "waiting",
        "waiting_blocks",
    )

    def __init__(self) -> None:
        self.blocks = self.allocated = self.requested = 0
        self.waiting_blocks = self.waiting = 0
        self.split_blocks = self.split = 0
        self.segments = self.reserved = 0
        self.total_blocks = self.total_allocated = self.total_requested = 0
        self.total_split_blocks = self.total_split = 0
        self.total_segments = self.total_reserved = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        self.peak_blocks = self.blocks
        self.peak_allocated = self.allocated
        self.peak_requested = self.requested
        # While nothing waits, the active blocks are the allocated ones: these peaks are for the other moments.
        self.peak_active_blocks = self.blocks + self.waiting_blocks
        self.peak_active = self.allocated + self.waiting
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
        if self.waiting:
            self.peak_active = max(self.peak_active, allocated + self.waiting)
            self.peak_active_blocks = max(self.peak_active_blocks, blocks + self.waiting_blocks)

    def remove_block(self, size: int, requested: int) -> None:
        """Count a block that was freed."""
        self.blocks -= 1
        self.allocated -= size
        self.requested -= requested

    def start_waiting(self, size: int) -> None:
        """Count an allocated block that was freed and waits for another stream."""
        self.blocks -= 1
        self.allocated -= size
        self.waiting_blocks += 1
        self.waiting += size

    def stop_waiting(self, size: int, requested: int) -> None:
        """Count a waiting block that became free."""
        self.waiting_blocks -= 1
        self.waiting -= size
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
        """Return the values by their names in ``torch.cuda.memory_stats`` without the pool: "allocated_bytes.peak"."""
        active_blocks = self.blocks + self.waiting_blocks
        active = self.allocated + self.waiting
        peak_active_blocks = max(self.peak_active_blocks, self.peak_blocks)
        peak_active = max(self.peak_active, self.peak_allocated)
        rows = {
            "allocation": (self.blocks, self.peak_blocks, self.total_blocks),
            "segment": (self.segments, self.peak_segments, self.total_segments),
            "active": (active_blocks, peak_active_blocks, self.total_blocks),
            "inactive_split": (self.split_blocks, self.peak_split_blocks, self.total_split_blocks),
            "allocated_bytes": (self.allocated, self.peak_allocated, self.total_allocated),
            "reserved_bytes": (self.reserved, self.peak_reserved, self.total_reserved),
            "active_bytes": (active, peak_active, self.total_allocated),
            "inactive_split_bytes": (self.split, self.peak_split, self.total_split),
            "requested_bytes": (self.requested, self.peak_requested, self.total_requested),
        }
        return {
            f"{metric}.{kind}": value
            for metric, (current, peak, total) in rows.items()
            for kind, value in (("current", current), ("peak", peak), ("allocated", total), ("freed", total - current))
        }
