"""Hears of an out-of-memory error before it unwinds, where the device allows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lightning_memtools.memory.virtual import VirtualDevice

Observer = Callable[[int, int, int, int], object]
"""Called with a device's index, the bytes asked of it, its bytes in all, and its free bytes."""

# torch's observers can be attached and not detached, so there is one in a process, which asks this list.
_listeners: list[Observer] = []
_attached = False


def observe(device: torch.device, observer: Observer) -> Callable[[], None] | None:
    """Have the observer called when the device runs out of memory, before anything unwinds.

    Returns:
        What ends it; None where the device tells nobody: then only the exception itself is left to look at.
    """
    virtual = VirtualDevice.current()
    if virtual is not None and device.type == "cpu":
        return virtual.observe_oom(observer).remove
    if device.type == "cuda" and _attach():
        _listeners.append(observer)

        def remove() -> None:
            if observer in _listeners:
                _listeners.remove(observer)

        return remove
    return None


def _attach() -> bool:
    """Attach the one observer, if that was not done yet; whether it is attached."""
    global _attached  # noqa: PLW0603, see `_listeners`
    if _attached:
        return True
    # It is attached to the allocators of the devices that there are, which the initialisation makes.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # noqa: SLF001, torch offers no public one
    # Other allocators than torch's own (cudaMallocAsync, pluggable ones) raise: they tell nobody.
    with suppress(RuntimeError):
        attach(_tell)
        _attached = True
    return _attached


def _tell(device: int, n_bytes: int, total: int, free: int) -> None:
    for listener in _listeners:
        # What it raised would take the place of the out-of-memory error.
        with suppress(Exception):
            listener(device, n_bytes, total, free)
