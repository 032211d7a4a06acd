"""Recording what is asked of the allocator, on a GPU and on a simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.memory.virtual import VirtualDevice

MOST_ENTRIES = 50_000
"""How many actions are kept. The stack of one takes up to a kilobyte of host memory on a GPU."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that is under way.

    Attributes:
        take: Gives the snapshot: segments, blocks, and the actions recorded. Allocates nothing on the device.
        now: The present on the recording's clock (`time_us`).
        stop: Ends it.
    """

    take: Callable[[], dict[str, Any]]
    now: Callable[[], int]
    stop: Callable[[], None]


def record(reader: MemoryReader | None) -> Recording | None:
    """Begin to record; None where no history is kept. What somebody else records already is left to go on."""
    if isinstance(reader, VirtualDevice):
        return _record_virtual(reader)
    return _record_cuda() if isinstance(reader, CudaReader) else None


def _record_virtual(device: VirtualDevice) -> Recording:
    is_ours = device.history is None
    if is_ours:
        device.record_history(MOST_ENTRIES)
    history = device.history
    assert history is not None

    def stop() -> None:
        if is_ours and device.history is history:
            device.record_history(0)

    return Recording(device.snapshot, lambda: history.count, stop)


def _record_cuda() -> Recording | None:
    memory: Any = torch.cuda.memory
    is_enabled: Any = torch._C._cuda_isHistoryEnabled  # noqa: SLF001, torch offers no public one
    try:
        is_ours = not is_enabled()
        if is_ours:
            # All stacks, those of C++ too, make a dump take minutes: torchtitan measured 461 s against 4 s. Freeing
            # needs no stack.
            memory._record_memory_history(  # noqa: SLF001, documented by torch under this name
                enabled="all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
            )
    except RuntimeError:  # from other allocators than torch's own (cudaMallocAsync, pluggable ones)
        return None

    def stop() -> None:
        if is_ours:
            memory._record_memory_history(enabled=None)  # noqa: SLF001, as above

    return Recording(memory._snapshot, lambda: time.time_ns() // 1000, stop)  # noqa: SLF001, as above
