"""Records the requests to a device's allocator, on a GPU or on a VirtualDevice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_memtools._torch import (
    cuda_memory_snapshot,
    is_cuda_history_recorded,
    record_cuda_history,
    stop_cuda_history,
)
from lightning_memtools.memory.readers import CudaReader
from lightning_memtools.memory.stats import MemoryReader
from lightning_memtools.memory.virtual import VirtualDevice

MOST_ENTRIES = 50_000
"""The number of actions to keep. On a GPU each action's stack takes up to a kilobyte of host memory."""

# CUDA records once for the whole process. These are our recordings, and whether each wants Python stacks.
_running: dict[object, bool] = {}


@dataclass(frozen=True, slots=True)
class HistoryRecording:
    """Functions that control a running recording of the allocator's history.

    Attributes:
        take: Returns a snapshot with segments, blocks and the recorded actions. It allocates nothing on the device.
        now: Returns the current time, comparable with the `time_us` of the recorded actions.
        stop: Ends the recording.
        want_stacks: Takes a bool: whether to record Python stacks, which cost 3 us per allocation. The default is True.
            Stacks are recorded as long as any recording in this process wants them.
    """

    take: Callable[[], dict[str, Any]]
    now: Callable[[], int]
    stop: Callable[[], None]
    want_stacks: Callable[[bool], None]


def record(reader: MemoryReader | None) -> HistoryRecording | None:
    """Start recording the allocator's history, or join a recording that other code has started.

    Returns:
        The recording; None if the device keeps no history.
    """
    if isinstance(reader, VirtualDevice):
        return _record_virtual(reader)
    return _record_cuda() if isinstance(reader, CudaReader) else None


def _record_virtual(device: VirtualDevice) -> HistoryRecording:
    is_ours = device.history is None
    if is_ours:
        device.record_history(MOST_ENTRIES)
    history = device.history
    assert history is not None

    def stop() -> None:
        if is_ours and device.history is history:
            device.record_history(0)

    return HistoryRecording(device.snapshot, lambda: history.count, stop, lambda _: None)


def _record_cuda() -> HistoryRecording | None:
    ours = object()
    try:
        if not is_cuda_history_recorded() or _running:
            _change(ours, stacks=True)
    except RuntimeError:  # from other allocators than torch's own (cudaMallocAsync, pluggable ones)
        return None
    return HistoryRecording(
        take=cuda_memory_snapshot,
        now=lambda: time.time_ns() // 1000,
        stop=lambda: _change(ours, stacks=None),
        want_stacks=lambda wanted: _change(ours, stacks=wanted) if ours in _running else None,
    )


def _change(recording: object, *, stacks: bool | None) -> None:
    """Start recording the CUDA allocator's history, with or without Python stacks; with `stacks=None`, stop."""
    before = _running.copy()
    if stacks is None:
        _running.pop(recording, None)
    else:
        _running[recording] = stacks
    if before and not _running:
        stop_cuda_history()
    elif any(_running.values()) != any(before.values()) or len(_running) > len(before):
        record_cuda_history(MOST_ENTRIES, stacks=any(_running.values()))
