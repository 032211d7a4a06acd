"""A simulated GPU: `VirtualDevice` and what it says of its memory."""

from __future__ import annotations

from lightning_memtools.memory.virtual.categories import Category, Composition
from lightning_memtools.memory.virtual.device import VirtualDevice, host_memory, put_on_device

__all__ = ["Category", "Composition", "VirtualDevice", "host_memory", "put_on_device"]
