"""Device values that are used once they have reached the host, so that nobody waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Then = Callable[[Any], None]
"""Gets the values as `Tensor.tolist` gives them."""


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    host: Tensor
    copied: torch.cuda.Event | None
    then: Then


class DeferredValues:
    """Copies device vectors to pinned memory and hands each on when its copy has arrived, in order.

    On the CPU there is nothing to wait for, and everything is handed on at once.
    """

    def __init__(self) -> None:
        self._queue: deque[_OnItsWay] = deque()

    def put(self, values: Tensor, then: Then) -> None:
        """Send a vector on its way; `then` gets it."""
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(values.device))
            self._queue.append(_OnItsWay(host, copied, then))
        else:
            # Other accelerators have no event that every build of torch offers: they wait here.
            self._queue.append(_OnItsWay(values.cpu(), None, then))
        self.poll()

    def poll(self) -> None:
        """Hand on what has arrived, without waiting."""
        while self._queue and (self._queue[0].copied is None or self._queue[0].copied.query()):  # type: ignore[no-untyped-call]
            self._hand_on_first()

    def drain(self) -> None:
        """Wait for what is on its way and hand it on."""
        while self._queue:
            if self._queue[0].copied is not None:
                self._queue[0].copied.synchronize()
            self._hand_on_first()

    def clear(self) -> None:
        """Forget what is on its way."""
        self._queue.clear()

    def _hand_on_first(self) -> None:
        first = self._queue.popleft()
        first.then(first.host.tolist())
