"""Figures of a device, as the numbers they always are on a virtual one."""

from __future__ import annotations

from lightning_memtools.memory.virtual import VirtualDevice


def allocated(device: VirtualDevice) -> int:
    n_bytes = device.stats().allocated
    assert n_bytes is not None
    return n_bytes


def peak(device: VirtualDevice) -> int:
    n_bytes = device.stats().peak_allocated
    assert n_bytes is not None
    return n_bytes
