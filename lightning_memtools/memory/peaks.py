"""The peak of any stretch of time, from a device that keeps only one resettable peak.

A device has a single peak counter per figure. Whoever resets it takes the peak away from everyone else, so one object
owns it: `PeakCounter`. Others open a `PeakWindow` there. Each reset first folds the device's peak into all windows that
are running, so no window loses a peak to another's reset, and none is given a peak from outside its own time.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from lightning_memtools.memory.stats import MemoryReader, MemoryStats


class PeakWindow:
    """The highest allocated and reserved bytes while the window was running; made by `PeakCounter.open`.

    Attributes:
        allocated: Highest allocated bytes; None before anything was folded in, or where the device keeps no peaks.
        reserved: Likewise for reserved bytes.
        composition: Bytes per category when allocated was highest, where the device knows.
    """

    def __init__(self, counter: PeakCounter, *, leave_counter_alone: bool) -> None:
        self.allocated: int | None = None
        self.reserved: int | None = None
        self.composition: Mapping[str, int] | None = None
        self.leave_counter_alone = leave_counter_alone
        self._counter = counter

    def pause(self) -> MemoryStats:
        """Fold in what happened so far and stop watching."""
        stats = self._counter.fold()
        self._counter.running.discard(self)
        return stats

    def resume(self) -> MemoryStats:
        """Watch from this moment on. What happened while paused is not the window's."""
        stats = self._counter.fold(reset=not self.leave_counter_alone)
        self._counter.running.add(self)
        return stats

    def restart(self) -> None:
        """Forget the peak. A running window goes on from the present; call it after `fold`."""
        self.allocated = self.reserved = self.composition = None

    def close(self) -> None:
        """Stop watching, without reading the device again. Closing twice does no harm."""
        self._counter.running.discard(self)


class PeakCounter:
    """The one owner of a device's peak counter. Get it with `peak_counter(reader)`."""

    def __init__(self, reader: MemoryReader) -> None:
        # Weak, because the counter is kept for as long as its reader lives.
        self._reader = weakref.ref(reader)
        self.running: set[PeakWindow] = set()

    @property
    def reader(self) -> MemoryReader:
        """The device that is read.

        Raises:
            ReferenceError: The device is gone.
        """
        reader = self._reader()
        if reader is None:
            raise ReferenceError("The device whose peaks are read no longer exists.")
        return reader

    def open(self, *, leave_counter_alone: bool = False) -> PeakWindow:
        """A paused window; `resume()` starts it.

        Args:
            leave_counter_alone: While this window is running nothing resets the device's counter, for the sake of
                others who read it. The window then holds the device's running maximum, which may be older than itself.
        """
        return PeakWindow(self, leave_counter_alone=leave_counter_alone)

    def fold(self, *, reset: bool = True) -> MemoryStats:
        """Read the device, give its peaks to all running windows, reset them, and return what was read."""
        reader = self.reader
        stats = reader.stats()
        composition: Mapping[str, int] | None = None
        for window in self.running:
            if stats.peak_allocated is not None and (
                window.allocated is None or stats.peak_allocated > window.allocated
            ):
                window.allocated = stats.peak_allocated
                if composition is None:
                    composition = reader.composition_at_peak()
                window.composition = composition
            if stats.peak_reserved is not None:
                window.reserved = max(window.reserved or 0, stats.peak_reserved)
        if reset and not any(window.leave_counter_alone for window in self.running):
            reader.reset_peaks()
        return stats

    def forget(self) -> None:
        """Drop the device's peaks since the last reading: no window is given them."""
        if not any(window.leave_counter_alone for window in self.running):
            self.reader.reset_peaks()


# One owner per device is the point of this file, so the owners are kept here, for as long as their readers live.
_COUNTERS: weakref.WeakKeyDictionary[MemoryReader, PeakCounter] = weakref.WeakKeyDictionary()


def peak_counter(reader: MemoryReader) -> PeakCounter:
    """The owner of this device's peak counter, the same for every caller."""
    return _COUNTERS.setdefault(reader, PeakCounter(reader))
