"""Warns once of each sign that memory is about to run out."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lightning_memtools.memory.first_time import FirstTime
from lightning_memtools.memory.peaks import MemoryPoint
from lightning_memtools.memory.sizes import format_size

_NEARLY_FULL = 0.95
# Reserved memory in pieces is worth a word from this share of the device on, once it has risen so often in a row.
_FRAGMENTED = 0.1
_RISES = 3
_EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True may help."
_SMALLER = "Next: GradientCheckpointing, precision='bf16-mixed', or a smaller batch (BatchSizeTuner finds the largest)."


class EarlyWarnings:
    """Checks the memory readings of a run for signs that memory may run out, and gives each warning once.

    Args:
        retries: The number of allocation retries that the device had counted when the run began.
    """

    def __init__(self, *, retries: int = 0) -> None:
        self._retries = retries
        self._pieces: list[int] = []
        self._is_new = FirstTime()

    def look(self, point: MemoryPoint, *, warms_up: bool = False) -> list[str]:
        """Return new warnings from one reading of memory. With `warms_up` (the first steps), ignore fragmentation."""
        return [text for name, text in self._findings(point, warms_up=warms_up) if self._is_new(name)]

    def _findings(self, point: MemoryPoint, *, warms_up: bool) -> Iterator[tuple[str, str]]:
        stats = point.stats
        n_retries = (stats.alloc_retries or 0) - self._retries
        if n_retries > 0:
            text = (
                f"Allocation retries have begun ({n_retries}): the device was full, and the allocator waited for it "
                "and gave its cache back to serve a request. That slows a step down, and the next request may fail. "
            )
            yield "retries", f"{text}{_EXPANDABLE} {_SMALLER}"
        if stats.capacity and (point.peak_reserved or 0) > _NEARLY_FULL * stats.capacity:
            share = 100 * (point.peak_reserved or 0) / stats.capacity
            text = (
                f"Peak reserved memory is {format_size(point.peak_reserved or 0)}, {share:.1f}% of the device's "
                f"{format_size(stats.capacity)}: a longer sequence or a larger batch may fail. {_SMALLER}"
            )
            yield "full", text
        if warms_up:
            return
        pieces = stats.inactive_split or 0
        self._pieces = [*self._pieces, pieces] if self._pieces and pieces > self._pieces[-1] else [pieces]
        least = _FRAGMENTED * (stats.capacity or sys.maxsize)
        if len(self._pieces) > _RISES and pieces > least:
            text = (
                f"Fragmentation grows: {format_size(self._pieces[0])} of reserved memory lay free in pieces "
                f"{len(self._pieces) - 1} points ago, {format_size(pieces)} do now. No large request can use them. "
            )
            yield "fragmentation", text + _EXPANDABLE
