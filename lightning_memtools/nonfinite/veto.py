"""Holds updates back on the device, without waiting for it: the flag that fused optimizers obey."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class Reading(Generic[Note]):
    """What a step's check found, read later.

    Attributes:
        note: What was given to `check`.
        bad: Whether the step was found bad.
        halts: Whether it was one bad step too many: nothing moved in it or after it.
        numbers: The numbers that were checked.
    """

    note: Note
    bad: bool
    halts: bool
    numbers: list[float]


@dataclass(slots=True)
class _Pending(Generic[Note]):
    note: Note
    numbers: Tensor
    arrival: torch.cuda.Event | None


class Veto(Generic[Note]):
    """Decides on the device whether a step may move anything, and tells the host when the answer has arrived.

    `flag` is a 0-dim float32 tensor, 1 where the step is held back, for `optimizer.found_inf`. It is sticky: after more
    than `max_skips` bad steps it stays 1, so that it does not matter how late the host learns of it.

    Args:
        device: Where the gradients are.
        max_skips: How many bad steps are held back without ending the run.
    """

    def __init__(self, device: torch.device, max_skips: int) -> None:
        self.flag = torch.zeros((), device=device)
        self._n_bad = torch.zeros((), device=device)
        self._max_skips = max_skips
        self._pending: deque[_Pending[Note]] = deque()
        self._attached: list[Optimizer] = []

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, n_deciding: int, note: Note) -> None:
        """Hold the coming step back if one of the first `n_deciding` numbers is NaN or Inf. Does not wait."""
        bad = ~torch.isfinite(numbers[:n_deciding]).all()
        self._n_bad.add_(bad)
        halts = self._n_bad > self._max_skips
        # Exactly 0 or 1: the kernels subtract it from the step count.
        self.flag.copy_(bad | halts)
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        if all(optimizer is not other for other in self._attached):
            self._attached.append(optimizer)
        verdict = torch.stack([bad.to(numbers.dtype), halts.to(numbers.dtype)])
        self._pending.append(self._send(torch.cat([verdict, numbers]), note))

    def notes(self) -> Sequence[Note]:
        """The notes of the steps not yet read, oldest first."""
        return [pending.note for pending in self._pending]

    def read(self, *, wait: bool) -> list[Reading[Note]]:
        """What has arrived since, oldest first; with `wait`, everything."""
        readings = []
        while self._pending:
            pending = self._pending[0]
            if pending.arrival is not None and not pending.arrival.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                pending.arrival.synchronize()
            self._pending.popleft()
            bad, halts, *numbers = pending.numbers.tolist()
            readings.append(Reading(pending.note, bool(bad), bool(halts), numbers))
        return readings

    def close(self) -> None:
        """Take the flag off the optimizers; closing twice does no harm."""
        for optimizer in self._attached:
            if getattr(optimizer, "found_inf", None) is self.flag:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._attached.clear()
        self._pending.clear()

    @staticmethod
    def _send(numbers: Tensor, note: Note) -> _Pending[Note]:
        if numbers.device.type != "cuda":
            return _Pending(note, numbers, None)
        # Only a copy into pinned memory leaves the host free to go on.
        arrived = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        arrived.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(numbers.device))
        return _Pending(note, arrived, event)
