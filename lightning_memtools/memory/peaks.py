"""Peaks by stage: training and the evaluations that interrupt it, on a device that keeps only one resettable peak.

A device has a single peak counter per figure. A reset loses the peak for every reader, so one object owns the counter:
`PeakCounter`. Others open a `PeakWindow` there. Each reset first adds the device's peak to all windows that are
running, so no window loses a peak to another's reset, and none gets a peak from outside its own time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.owned import Owned, composition_of
from lightning_memtools.memory.stats import MemoryReader, MemoryStats

Stage = Literal["train", "val", "test", "predict"]
Phase = Literal["forward", "backward", "optimizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)
PHASES: tuple[Phase, ...] = get_args(Phase)


class PeakWindow:
    """Tracks the highest allocated and reserved bytes while it is running. `PeakCounter.open` creates a window.

    Attributes:
        allocated: Highest allocated bytes; None before the first reading, or if the device keeps no peaks.
        reserved: The same for reserved bytes.
        composition: Bytes per category, such as parameters, at the allocated peak; None if the device cannot tell.
    """

    def __init__(self, counter: PeakCounter) -> None:
        self.allocated: int | None = None
        self.reserved: int | None = None
        self.composition: Mapping[str, int] | None = None
        self._counter = counter

    def pause(self) -> MemoryStats:
        """Stop tracking after recording the peak so far, and return the device's current statistics."""
        stats = self._counter.fold()
        self._counter.running.discard(self)
        return stats

    def resume(self) -> MemoryStats:
        """Track the peak again after a pause. Return the device's current statistics."""
        stats = self._counter.fold()
        self._counter.running.add(self)
        return stats

    def restart(self) -> None:
        """Forget the peaks recorded so far. Call `PeakCounter.fold` first, which resets the device's peaks."""
        self.allocated = self.reserved = self.composition = None

    def close(self) -> None:
        """Stop tracking, without reading the device again. Idempotent."""
        self._counter.running.discard(self)


class PeakCounter:
    """Reads and resets a device's peak counters for all `PeakWindow`s. No other code may reset these counters."""

    def __init__(self, reader: MemoryReader) -> None:
        # Weak, because the counter is kept for as long as its reader lives.
        self._reader = weakref.ref(reader)
        self.running: set[PeakWindow] = set()

    @property
    def reader(self) -> MemoryReader:
        """The device whose memory statistics are read.

        Raises:
            ReferenceError: The device no longer exists.
        """
        reader = self._reader()
        if reader is None:
            raise ReferenceError("The device whose peaks are read no longer exists.")
        return reader

    def open(self) -> PeakWindow:
        """Return a new `PeakWindow`, which is paused until `resume()` is called."""
        return PeakWindow(self)

    def fold(self, *, reset: bool = True) -> MemoryStats:
        """Read the device's memory statistics, update the peaks of all running windows, and return the statistics.

        Args:
            reset: Whether to reset the device's peaks afterwards; False if the caller does this.
        """
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
        if reset:
            reader.reset_peaks()
        return stats

    def forget(self) -> None:
        """Reset the device's peaks without reading them, so that they count in no `PeakWindow`."""
        self.reader.reset_peaks()


# There must be one owner per device, so the owners are kept here for as long as their readers live.
_COUNTERS: weakref.WeakKeyDictionary[MemoryReader, PeakCounter] = weakref.WeakKeyDictionary()


def peak_counter(reader: MemoryReader) -> PeakCounter:
    """Return the device's `PeakCounter`, the same one for every caller."""
    return _COUNTERS.setdefault(reader, PeakCounter(reader))


# --- peaks of stages and phases


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """One reading of the memory during a stage, which becomes a point on the logged curve.

    Attributes:
        stats: The device's statistics at this moment.
        peak_allocated: Highest allocated bytes since the stage's last point; None if the device keeps no peaks.
        peak_reserved: The same for reserved bytes.
        composition: Bytes per category, such as parameters, at the allocated peak; None if the device cannot tell.
    """

    stats: MemoryStats
    peak_allocated: int | None
    peak_reserved: int | None
    composition: Mapping[str, int] | None


@dataclass(slots=True)
class StagePeak:
    """The highest memory of a stage (such as "train") over the whole run, in bytes."""

    allocated: int | None = None
    reserved: int | None = None
    composition: Mapping[str, int] | None = None

    def take_in(self, point: MemoryPoint) -> None:
        """Raise each peak to the value in `point`, if that is higher."""
        if point.peak_allocated is not None and point.peak_allocated > (self.allocated or -1):
            self.allocated = point.peak_allocated
            self.composition = point.composition
        if point.peak_reserved is not None:
            self.reserved = max(self.reserved or 0, point.peak_reserved)


class StageWatch:
    """Keeps the memory peaks of each stage, such as "train". Validation inside training does not count as training."""

    def __init__(self, counter: PeakCounter) -> None:
        self.peaks: dict[Stage, StagePeak] = {}
        self._counter = counter
        self._windows: dict[Stage, PeakWindow] = {}
        self._running: list[Stage] = []  # the innermost is the last

    def enter(self, stage: Stage) -> None:
        """Begin a stage, and pause the stage that is running, if any."""
        if self._running:
            self._windows[self._running[-1]].pause()
        self._running.append(stage)
        if stage not in self._windows:
            self._windows[stage] = self._counter.open()
        self._windows[stage].resume()

    def leave(self, stage: Stage) -> None:
        """End a stage, and resume the stage that it interrupted, if any. Do nothing if the stage is not running."""
        if stage not in self._running:
            return
        self._windows[stage].pause()
        self._running.remove(stage)
        if self._running:
            self._windows[self._running[-1]].resume()

    @property
    def running(self) -> Stage | None:
        """The stage that is running, such as "val" while it interrupts training; None if no stage is running."""
        return self._running[-1] if self._running else None

    def point(self, stage: Stage, owned: Owned | None = None) -> MemoryPoint:
        """Return a running stage's memory: the device's current statistics, and the peaks since the stage's last point.

        Args:
            stage: The stage.
            owned: The memory that the model and its optimizers own now, to estimate `composition` if it is unknown.
        """
        stats = self._counter.fold()
        window = self._windows[stage]
        composition = window.composition
        if composition is None and owned is not None and window.allocated is not None:
            # What has no owner and outlives the step is no activation: libraries' workspaces, buffers of a strategy.
            older = max(0, (stats.allocated or 0) - owned.total_bytes)
            composition = composition_of(owned, window.allocated, older=older)
        point = MemoryPoint(stats, window.allocated, window.reserved, composition)
        window.restart()
        self.peaks.setdefault(stage, StagePeak()).take_in(point)
        return point

    def close(self) -> None:
        """Update `peaks` with the memory since the last point, and stop watching. Idempotent."""
        if self._running:
            self.point(self._running[-1])
        self._running.clear()
        for window in self._windows.values():
            window.close()
        self._windows.clear()


class PhaseClock:
    """Measures the time, on the host, of consecutive phases: each phase ends when the next one begins."""

    def __init__(self) -> None:
        self._elapsed_s: dict[str, float] = {}
        self._running: str | None = None
        self._since = 0.0

    def switch(self, phase: str | None) -> None:
        """End the running phase, if any. Then begin `phase`, unless it is None."""
        now = time.perf_counter()
        if self._running is not None:
            self._elapsed_s[self._running] = self._elapsed_s.get(self._running, 0.0) + now - self._since
        self._running, self._since = phase, now

    def lap_ms(self) -> dict[str, float]:
        """Return the milliseconds spent in each phase since the last call of this method."""
        running = self._running
        self.switch(None)
        elapsed_ms = {phase: 1000 * seconds for phase, seconds in self._elapsed_s.items()}
        self._elapsed_s.clear()
        self.switch(running)
        return elapsed_ms


class PhaseWatch:
    """Tracks the memory peak of each phase of a training step: forward, backward, optimizer.

    Args:
        counter: The device's peak counter; None if the device keeps no peaks, so that only time is measured.
        between: The phase that begins when an optimizer's step ends: "forward" in manual optimization, where the
            training step goes on, or None (no phase) in automatic optimization.
        clock: A clock that measures the host time of the same phases; None to measure no time.
    """

    def __init__(
        self, counter: PeakCounter | None, *, between: Phase | None = None, clock: PhaseClock | None = None
    ) -> None:
        self.between = between
        self._clock = clock
        self._windows: dict[Phase, PeakWindow] = {}
        if counter is not None:
            self._windows = {phase: counter.open() for phase in PHASES}
        self._running: Phase | None = None
        self._hooks: list[RemovableHandle] = []

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Register hooks that end the optimizer phase whenever a step of these optimizers returns."""
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.switch(self.between)))

    def switch(self, phase: Phase | None) -> None:
        """End the running phase, if any. Then begin `phase`, unless it is None."""
        if self._clock is not None:
            self._clock.switch(phase)
        if phase == self._running:
            return
        if self._running in self._windows:
            self._windows[self._running].pause()
        self._running = phase
        if phase in self._windows:
            self._windows[phase].resume()

    def point(self) -> dict[Phase, int]:
        """Return the highest allocated bytes of each phase that has run since the last call."""
        peaks: dict[Phase, int] = {}
        for phase, window in self._windows.items():
            if window.allocated is not None:
                peaks[phase] = window.allocated
            window.restart()
        return peaks

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._running = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for window in self._windows.values():
            window.close()
