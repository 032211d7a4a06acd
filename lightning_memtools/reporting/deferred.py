"""Device scalars that are written once they have reached the host, so that nobody waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Write = Callable[[dict[str, float], int], None]


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    tags: Sequence[str]
    host: Tensor
    copied: torch.cuda.Event | None
    step: int


class DeferredScalars:
    """Copies device vectors to pinned memory and writes each when its copy has arrived, in order.

    On the CPU there is nothing to wait for, and everything is written at once.
    """

    def __init__(self) -> None:
        self._queue: deque[_OnItsWay] = deque()

    def put(self, tags: Sequence[str], values: Tensor, step: int, write: Write) -> None:
        """Send a vector on its way, one value per tag, to be written at `step`."""
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied: torch.cuda.Event | None = torch.cuda.Event()
            assert copied is not None
            copied.record(torch.cuda.current_stream(values.device))
        else:
            host, copied = values.cpu(), None  # other accelerators have no event that all builds offer
        self._queue.append(_OnItsWay(tuple(tags), host, copied, step))
        self.poll(write)

    def poll(self, write: Write) -> None:
        """Write what has arrived, without waiting."""
        while self._queue and (self._queue[0].copied is None or self._queue[0].copied.query()):
            self._write_first(write)

    def drain(self, write: Write) -> None:
        """Wait for what is on its way and write it."""
        while self._queue:
            copied = self._queue[0].copied
            if copied is not None:
                copied.synchronize()
            self._write_first(write)

    def _write_first(self, write: Write) -> None:
        item = self._queue.popleft()
        write(dict(zip(item.tags, item.host.tolist(), strict=True)), item.step)
