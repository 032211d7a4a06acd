"""Measures the seconds of each phase of training, by the host's clock and on a GPU by events, without waiting."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_memtools.memory.peaks import PhaseClock

_FETCHES = ".train_dataloader_next"


class PhaseTimes:
    """Measures how long the phases of training steps take, such as forward. Each begins when the previous one ends.

    The host only queues kernels for a GPU, so the host's clock does not tell when the GPU runs them. With a GPU, each
    change of phase therefore also records a CUDA event. The event is read once the GPU has passed it.

    Args:
        device: The device that the model runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = PhaseClock()
        self._device = device if device.type == "cuda" else None
        self._device_s: defaultdict[str, float] = defaultdict(float)
        self._marks: deque[tuple[str | None, Any]] = deque()
        self._spare: list[Any] = []
        self._forward: Any = None
        self._running: str | None = None
        self._behind: list[bool] = []

    def switch(self, phase: str | None) -> None:
        """End the current phase, if any, and begin `phase`, such as "forward". With None, begin no phase."""
        if phase == self._running:
            return
        self._running = phase
        self._host.switch(phase)
        # An event of a stream that is being captured as a graph cannot be asked.
        if self._device is None or torch.cuda.is_current_stream_capturing():
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))
        if phase == "forward":
            self._forward = event
        self._read()

    def look_at_lead(self) -> None:
        """Record whether the GPU has begun the current step. Call this when the host has queued the backward pass."""
        if self._forward is not None:
            self._behind.append(not self._forward.query())
            self._forward = None

    def forget(self) -> None:
        """Drop all measurements so far, including the time that the current phase has taken until now."""
        self._host.lap_ms()
        self._device_s.clear()
        self._marks = deque(list(self._marks)[-1:])
        self._behind.clear()

    @property
    def behind_share(self) -> float:
        """The fraction of steps that the GPU began only after the host had queued their entire backward pass."""
        return sum(self._behind) / max(1, len(self._behind))

    def host_s(self) -> dict[str, float]:
        """Return the seconds that each phase took on the host, since the last call of this method."""
        return {phase: ms / 1000 for phase, ms in self._host.lap_ms().items()}

    def device_s(self) -> dict[str, float] | None:
        """Return the seconds that each phase took on the GPU, without unfinished phases; None if nothing was timed."""
        self._read()
        return dict(self._device_s) if any(self._device_s.values()) else None

    def _read(self) -> None:
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, began = self._marks.popleft()
            if phase is not None:
                self._device_s[phase] += began.elapsed_time(self._marks[0][1]) / 1000
            self._spare.append(began)


def watch_fetching(profiler: Any, switch: Callable[[str], None]) -> Callable[[], None]:
    """Make `profiler` call `switch("data")` before Lightning fetches a training batch, and `switch("rest")` after it.

    Lightning has no hook for this, so two methods of its profiler are replaced. Return a function that restores them.
    """
    start, stop = profiler.start, profiler.stop

    def started(action: str) -> None:
        if action.endswith(_FETCHES):
            switch("data")
        start(action)

    def stopped(action: str) -> None:
        stop(action)
        if action.endswith(_FETCHES):
            switch("rest")

    profiler.start, profiler.stop = started, stopped

    def undo() -> None:
        for name, ours in (("start", started), ("stop", stopped)):
            if vars(profiler).get(name) is ours:
                delattr(profiler, name)

    return undo
