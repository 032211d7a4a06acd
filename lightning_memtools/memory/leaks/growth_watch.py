"""Notices memory that rises steadily from step to step, by a counter that is read now and then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_memtools.memory.stats import MemoryStats

EVERY = 50
"""The number of batches from one reading to the next."""
# Seven readings: a steady rise is noticed 300 batches after it began.
_READINGS = 7
# The smallest and the largest growth between two readings, as multiples of their mean: sizes that vary by chance differ
# by more.
_LEAST, _MOST = 0.25, 4.0
# As a share of what is allocated: allocators and libraries move so much by themselves.
_LEAST_GROWTH = 0.01


@dataclass(frozen=True, slots=True)
class SteadyGrowth:
    """Memory that rises steadily.

    Attributes:
        n_bytes: The growth since it was first seen.
        n_batches: The number of batches in that time.
        n_left: The number of further batches until the device is full at this rate; None where its size is not known.
        has_lasted: True if it went on over the end of an epoch.
    """

    n_bytes: int
    n_batches: int
    n_left: int | None
    has_lasted: bool

    @property
    def per_batch(self) -> float:
        """The bytes by which it grows in each batch, on average."""
        return self.n_bytes / self.n_batches


class GrowthWatch:
    """Takes the allocated bytes at the beginning of every fiftieth batch, without those of the batch itself."""

    def __init__(self) -> None:
        self._levels: deque[int] = deque(maxlen=_READINGS)
        self._n_batches: deque[int] = deque(maxlen=_READINGS)
        self._epochs: deque[int] = deque(maxlen=_READINGS)

    def read(self, level: int, n_batches: int, epoch: int) -> bool:
        """Take a reading, and return whether memory has risen steadily for so long that it is worth a look.

        Args:
            level: The allocated bytes.
            n_batches: The number of batches so far.
            epoch: The epoch.
        """
        if self._levels and level <= self._levels[-1]:
            self.restart()
        self._levels.append(level)
        self._n_batches.append(n_batches)
        self._epochs.append(epoch)
        if len(self._levels) < _READINGS:
            return False
        growths = [after - before for before, after in zip(self._levels, list(self._levels)[1:], strict=False)]
        mean = sum(growths) / len(growths)
        return min(growths) >= _LEAST * mean and max(growths) <= _MOST * mean and sum(growths) > _LEAST_GROWTH * level

    def restart(self) -> None:
        """Forget all readings."""
        self._levels.clear()
        self._n_batches.clear()
        self._epochs.clear()

    def growth(self, stats: MemoryStats) -> SteadyGrowth:
        """Return the growth that was read last, given the statistics of the device."""
        n_bytes = self._levels[-1] - self._levels[0]
        n_batches = self._n_batches[-1] - self._n_batches[0]
        n_left, room = None, room_of(stats)
        if room is not None:
            n_left = max(0, int(room * n_batches / n_bytes))
        return SteadyGrowth(n_bytes, n_batches, n_left, has_lasted=self._epochs[-1] > self._epochs[0])


def room_of(stats: MemoryStats) -> int | None:
    """Return the bytes of a device that no step has needed so far; None where its capacity is not known."""
    if stats.capacity is None:
        return None
    others = max(0, (stats.device_used or 0) - (stats.reserved or 0))
    return stats.capacity - others - max(stats.peak_allocated or 0, stats.allocated or 0)
