"""Memory by stage: training, and the evaluation runs that interrupt it, each with peaks of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memtools.memory.peaks import PeakCounter, PeakWindow
from lightning_memtools.memory.stats import MemoryStats

Stage = Literal["train", "val", "test", "predict"]
Phase = Literal["forward", "backward", "optimizer"]
STAGES: tuple[Stage, ...] = get_args(Stage)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A stage's memory at one point of its curve.

    Attributes:
        stats: The device at this moment.
        peak_allocated: Highest allocated bytes since the stage's last point; None where the device keeps no peaks.
        peak_reserved: Likewise reserved.
        composition: Bytes per category when allocated was highest, where the device knows.
    """

    stats: MemoryStats
    peak_allocated: int | None
    peak_reserved: int | None
    composition: Mapping[str, int] | None


@dataclass(slots=True)
class StagePeak:
    """The highest values of a stage over the whole run, in bytes."""

    allocated: int | None = None
    reserved: int | None = None
    composition: Mapping[str, int] | None = None

    def take_in(self, point: MemoryPoint) -> None:
        """Raise the maxima to those of a point."""
        if point.peak_allocated is not None and point.peak_allocated > (self.allocated or -1):
            self.allocated = point.peak_allocated
            self.composition = point.composition
        if point.peak_reserved is not None:
            self.reserved = max(self.reserved or 0, point.peak_reserved)


class StageWatch:
    """Keeps one peak window per stage; an evaluation inside training interrupts training's window."""

    def __init__(self, counter: PeakCounter, *, leave_counter_alone: bool = False) -> None:
        self.peaks: dict[Stage, StagePeak] = {}
        self._counter = counter
        self._leave_counter_alone = leave_counter_alone
        self._windows: dict[Stage, PeakWindow] = {}
        self._running: list[Stage] = []  # the innermost is last

    def enter(self, stage: Stage) -> None:
        """Begin a stage; the one that was running, if any, is interrupted."""
        if self._running:
            self._windows[self._running[-1]].pause()
        self._running.append(stage)
        if stage not in self._windows:
            self._windows[stage] = self._counter.open(leave_counter_alone=self._leave_counter_alone)
        self._windows[stage].resume()

    def leave(self, stage: Stage) -> None:
        """End a stage; the one that it interrupted goes on. Does nothing if the stage is not running."""
        if stage not in self._running:
            return
        self._windows[stage].pause()
        self._running.remove(stage)
        if self._running:
            self._windows[self._running[-1]].resume()

    def point(self, stage: Stage) -> MemoryPoint:
        """What to show of a running stage now: the device, and the peaks since the stage's last point."""
        stats = self._counter.fold()
        window = self._windows[stage]
        point = MemoryPoint(stats, window.allocated, window.reserved, window.composition)
        window.restart()
        self.peaks.setdefault(stage, StagePeak()).take_in(point)
        return point

    def close(self) -> None:
        """Stop watching. What was not yet shown still counts in `peaks`. Closing twice does no harm."""
        if self._running:
            self.point(self._running[-1])
        self._running.clear()
        for window in self._windows.values():
            window.close()
        self._windows.clear()


class PhaseWatch:
    """Keeps one peak window per phase of a training step: forward, backward, optimizer.

    Args:
        counter: The device's peak counter.
        between: What the time between two hooks is. In manual optimization, after a backward or an optimizer's step,
            it is the next forward; in automatic optimization nothing is computed there (None).
        leave_counter_alone: As in `PeakCounter.open`.
    """

    def __init__(
        self, counter: PeakCounter, *, between: Phase | None = None, leave_counter_alone: bool = False
    ) -> None:
        self.between = between
        self._windows = {phase: counter.open(leave_counter_alone=leave_counter_alone) for phase in PHASES}
        self._running: Phase | None = None
        self._hooks: list[RemovableHandle] = []

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """End the optimizer phase when an optimizer's step returns; Lightning has no hook for that moment."""
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.switch(self.between)))

    def switch(self, phase: Phase | None) -> None:
        """End the running phase, if any, and begin another (None: none)."""
        if phase == self._running:
            return
        if self._running is not None:
            self._windows[self._running].pause()
        self._running = phase
        if phase is not None:
            self._windows[phase].resume()

    def point(self) -> dict[Phase, int]:
        """Highest allocated bytes of each phase since the last point, where known."""
        peaks: dict[Phase, int] = {}
        for phase, window in self._windows.items():
            if window.allocated is not None:
                peaks[phase] = window.allocated
            window.restart()
        return peaks

    def close(self) -> None:
        """Stop watching. Closing twice does no harm."""
        self._running = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for window in self._windows.values():
            window.close()
