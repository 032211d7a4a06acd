"""Finds how much a compiled model has to recompute: the `activation_memory_budget` whose measured peak fits.

torch.compile decides by itself what to recompute, for a share of the activations that it is given. The peak is not
monotonic in that share (pytorch issue 197838): what runs again in backward takes memory there. So each share is tried
on the training's own steps, which compute the same with any of them, and the device's peak decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightning_memtools._torch import set_activation_memory_budget
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.memory.peaks import PeakCounter, PeakWindow
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.tables import Table

# From no recomputation on. Each costs a compilation and two steps.
BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@dataclass(slots=True)
class CompiledBudget:
    """Tries one budget after the other, two steps each, until one fits; the first step of each compiles.

    Attributes:
        options: The options, with the limit.
        counter: The owner of the device's peak counter.
        accumulate: The number of batches per optimizer step: a step is measured as a whole.
        compile_anew: Makes the model compile again in its next step.
        peaks: The measured peaks, by budget.
        chosen: The budget that is kept; None while they are tried.
    """

    options: CheckpointOptions
    counter: PeakCounter
    accumulate: int = 1
    compile_anew: Callable[[], None] = torch.compiler.reset
    peaks: dict[float, int] = field(default_factory=dict)
    chosen: float | None = None
    _static: int = 0
    _batches: int = 0
    _steps: int = 0
    _window: PeakWindow | None = None
    _before: float | None = None

    def begin_batch(self) -> None:
        """Set the next budget, or measure the step that begins with this batch."""
        self._batches += 1
        if self.chosen is not None or (self._batches - 1) % self.accumulate:
            return
        self._steps += 1
        # Of the very first budget the second step is not measured either: it is the first with the optimizer's state.
        if self._steps == 1:
            self._before = set_activation_memory_budget(BUDGETS[0])
            self.compile_anew()
        elif self._steps >= 3:  # noqa: PLR2004
            self._window = self.counter.open()
            self._static = self._window.resume().allocated or 0

    def end_batch(self) -> bool:
        """Judge the budget if a step ends that was measured. Returns True once one is chosen, at this call."""
        if self._window is None or self._batches % self.accumulate:
            return False
        self._window.pause()
        peak = self._window.allocated or 0
        self._window.close()
        self._window = None
        tried = BUDGETS[len(self.peaks)]
        self.peaks[tried] = peak
        if peak <= self.limit_bytes:
            self.chosen = tried
            return True
        if len(self.peaks) < len(BUDGETS):
            self._take(BUDGETS[len(self.peaks)])
            self._steps = 1
            return False
        self.chosen = min(self.peaks, key=lambda budget: self.peaks[budget])
        if self.chosen != tried:
            self._take(self.chosen)
        return True

    @property
    def limit_bytes(self) -> int:
        """The highest allowed peak; of a share, what that share of the activations without recomputation comes to."""
        if self.options.budget_share is None:
            return self.options.budget_bytes or 0
        plain = self.peaks[BUDGETS[0]]
        return self._static + int(self.options.budget_share * (plain - self._static))

    @property
    def fits(self) -> bool:
        """True if the peak of the chosen budget was within the limit."""
        return self.chosen is not None and self.peaks[self.chosen] <= self.limit_bytes

    def table(self) -> Table:
        """Return a row for each budget that was tried."""
        rows = [
            (f"{budget:g}", format_size(peak), "chosen" if budget == self.chosen else "")
            for budget, peak in self.peaks.items()
        ]
        return Table(("activation_memory_budget", "measured peak", ""), rows, align="rrl")

    def __str__(self) -> str:
        assert self.chosen is not None
        peak, limit = format_size(self.peaks[self.chosen]), format_size(self.limit_bytes)
        if self.fits:
            return (
                f"torch.compile recomputes with activation_memory_budget={self.chosen:g}: peak {peak}, within {limit}"
            )
        return (
            f"No activation_memory_budget of torch.compile keeps the peak within {limit}; the lowest, {peak}, has "
            f"{self.chosen:g}, which is set"
        )

    def undo(self) -> None:
        """Set the budget that was there before. Calling it twice does no harm."""
        if self._window is not None:
            self._window.close()
        if self._before is not None:
            set_activation_memory_budget(self._before)
        self._window = self._before = None

    def _take(self, budget: float) -> None:
        set_activation_memory_budget(budget)
        self.compile_anew()
