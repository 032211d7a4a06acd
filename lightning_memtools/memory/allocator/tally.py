"""Counting for the small or the large pool: what is held now, what the peak was."""

from __future__ import annotations


class Tally:
    """Current values and peaks for one kind of pool; bytes, and counts where the name says so."""

    __slots__ = ("allocated", "inactive_split", "is_small", "requested", "reserved", "segments")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.allocated = 0
        self.requested = 0
        self.inactive_split = 0
        self.reserved = 0
        self.segments = 0
