"""A stopwatch that can be paused."""

from __future__ import annotations

import time


class Stopwatch:
    """Host time that passed while it was running. Starts paused."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._since: float | None = None

    def resume(self) -> None:
        """Run from now on; does nothing while running."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop; does nothing while paused."""
        if self._since is not None:
            self._elapsed_s += time.perf_counter() - self._since
            self._since = None

    def lap_ms(self) -> float:
        """Milliseconds since the last lap, pauses left out; begins a new lap."""
        running = self._since is not None
        self.pause()
        elapsed_ms = 1000 * self._elapsed_s
        self._elapsed_s = 0.0
        if running:
            self.resume()
        return elapsed_ms
