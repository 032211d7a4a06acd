"""Reads values from the device once their copies have reached the host, so that nothing waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class _PendingCopy(Generic[Note]):
    note: Note
    values: Tensor | list[float]
    copied: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        return self.copied is None or self.copied.query()  # type: ignore[no-untyped-call]


class ArrivingValues(Generic[Note]):
    """Copies device tensors to the host in the background, and returns the values once they are there.

    Each tensor is sent with a note, an arbitrary object that `receive` returns with the tensor's values. Values arrive
    in the order of sending; CPU tensors arrive at once. On accelerators other than CUDA, `receive` blocks.
    """

    def __init__(self) -> None:
        self._pending: deque[_PendingCopy[Note]] = deque()

    def send(self, values: Tensor | list[float], note: Note) -> None:
        """Start copying a tensor to the host, without waiting for the device.

        Args:
            values: The tensor, or a list of numbers. Do not change a CPU tensor or a list afterwards: it is not copied.
            note: Any object; `receive` returns it together with the values.
        """
        if isinstance(values, list) or values.device.type != "cuda":
            self._pending.append(_PendingCopy(note, values, None))
            return
        # Only a copy into pinned memory leaves the host free to go on.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(values.device))
        self._pending.append(_PendingCopy(note, host, copied))

    def receive(self, *, wait: bool = False) -> Iterator[tuple[Any, Note]]:
        """Yield a pair for each tensor that has arrived: its values, converted by `Tensor.tolist`, and its note.

        Args:
            wait: Whether to wait for the tensors that have not arrived yet.
        """
        while self._pending and (wait or self._pending[0].has_arrived()):
            first = self._pending.popleft()
            if wait and first.copied is not None:
                first.copied.synchronize()
            yield first.values if isinstance(first.values, list) else first.values.tolist(), first.note

    def __len__(self) -> int:
        return len(self._pending)

    def notes(self) -> list[Note]:
        """Return the notes of the tensors that have not been received yet, oldest first."""
        return [pending.note for pending in self._pending]

    def clear(self) -> None:
        """Drop all values that have not been received yet."""
        self._pending.clear()
