"""Check of memory: still growing after the second step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.leaks.holdings import Holding, find_holdings
from lightning_memtools.memory.leaks.leak_detector import SearchScope
from lightning_memtools.memory.owned import on_device_of
from lightning_memtools.memory.readers import reader_for
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.held_words import holding_in_words
from lightning_memtools.reporting.phrases import counted, in_series

MIN_GROWTHS = 6
_MOST_NAMED = 3


class GrowingMemory:
    """Check: memory that is allocated at the end of each step grows in every one, once the optimizer has its state."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case
        self._allocated: list[int] = []
        self._capacity: int | None = None

    def batch_end(self, _batch: Any, _index: int) -> Iterator[Finding]:
        """Read the host's counters of the device; a plain CPU has none."""
        reader = reader_for(self._case.device)
        if reader is not None:
            stats = reader.stats()
            self._capacity = stats.capacity
            if stats.allocated is not None:
                self._allocated.append(stats.allocated)
        yield from ()

    def conclude(self) -> Iterator[Finding]:
        """Report growth in every step, and whether the epoch would fill the device."""
        levels = self._allocated[2:]
        growths = [after - before for before, after in itertools.pairwise(levels)]
        if len(growths) < MIN_GROWTHS or min(growths) <= 0:
            return
        per_step = sum(growths) // len(growths)
        room = None if self._capacity is None else self._capacity - levels[-1]
        n_left = None if room is None else room // per_step
        n_batches = self._case.n_train_batches
        fills = n_left is not None and n_batches is not None and n_left < n_batches
        found = [one for one in self._held() if one.piles_up and 10 * one.n_bytes >= sum(growths)]
        who = in_series([holding_in_words(one) for one in found[:_MOST_NAMED]])
        yield Finding(
            "memory_growth",
            "warning" if fills else "info",
            str(self._case.device),
            f"Allocated memory grew in each of {len(growths)} steps after the third, by {format_size(per_step)} on "
            f"average, to {format_size(levels[-1])}."
            + (
                f" {counted(n_left or 0, 'more step fills', 'more steps fill')} the device; an epoch has {n_batches:,}."
                if fills
                else ""
            )
            + (f" What piles up: {who}." if who else ""),
            "Training runs out of memory." if fills else "An epoch's collected outputs do that too, until it ends.",
            ("" if who else "Find what is collected (EmptyCache names it). ")
            + "Keep numbers, or tensors on the host: x.detach().cpu().",
        )

    def _held(self) -> Sequence[Holding]:
        """Return who holds what is on the device beside the model and its optimizers."""
        case, reader = self._case, reader_for(self._case.device)
        if reader is None:
            return ()
        scope = SearchScope.around(case.model, case.others, case.stop_at)
        return find_holdings(on_device_of(reader, case.device), case.model, case.optimizers, None, scope).found
