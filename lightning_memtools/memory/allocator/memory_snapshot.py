"""Memory snapshots: written as torch.cuda.memory._snapshot() writes them, and read back into a trace for replay.

https://pytorch.org/memory_viz and torch's own tools read what is written; what is read may be torch's own. The keys and
values are those that torch/csrc/cuda/memory_snapshot.cpp writes.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace, TraceEventKind
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.blocks import UNMAPPED, Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.caching_allocator import CachingAllocator
from lightning_memtools.memory.allocator.trace_replay import replay
from lightning_memtools.tensorboard_plugin.snapshot_file import live_at_start

_FRAME = re.compile(r"(?P<filename>.+):(?P<line>\d+):(?P<name>.*)")
# torch writes the largest size_t for no limit, which is read as a signed number.
_NO_MAX_SPLIT = -1
# The viewer reads pickles up to this protocol; Python 3.14 writes newer ones by default.
_PICKLE_PROTOCOL = 4
_RELEASES = {"segment_free", "segment_unmap"}


class AllocatorHistory:
    """Keeps the last actions of an allocator, as torch's own recording does. Pass it to the allocator as its observer.

    Args:
        max_entries: The number of actions to keep; None for all.

    Attributes:
        count: The number of actions so far, including those that are no longer kept.
    """

    def __init__(self, max_entries: int | None = None) -> None:
        self.count = 0
        self._entries: deque[tuple[str, int, int, int, str | None]] = deque(maxlen=max_entries)

    def __call__(self, action: str, address: int, size: int, free_blocks: FreeBlocks, label: str | None) -> None:
        """Record an action of the allocator, on the stream of `free_blocks`."""
        self.count += 1
        self._entries.append((action, address, size, free_blocks.stream, label))

    def described(self, frames: Callable[[str | None], list[Any]]) -> list[dict[str, Any]]:
        """Return the actions in the form of torch's snapshots; `frames` returns the stack frames for a label."""
        first = self.count - len(self._entries)
        return [
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "pool_id": (0, 0),
                "time_us": first + at,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames(label),
            }
            for at, (action, address, size, stream, label) in enumerate(self._entries)
        ]


def take_snapshot(allocator: CachingAllocator, history: AllocatorHistory | None = None) -> dict[str, Any]:
    """Return a snapshot of an allocator: segments, blocks and history. The default history is the allocator's trace.

    A block's label becomes its stack trace, with one frame per line. If a line is not of the form
    ``file:line:function``, it becomes the frame's name. Times in the history count actions, not seconds.

    Returns:
        A dictionary with "segments", "device_traces" (of one device, 0), "allocator_settings" and
        "external_annotations".
    """
    if history is None:
        history = AllocatorHistory()
        if allocator.trace is not None:
            replay(allocator.trace, observer=history)
    # A history repeats few labels very often.
    frames: Callable[[str | None], list[Any]] = cache(_frames)
    config = allocator.config
    return {
        # An expandable segment is shown as the stretches that have memory behind them.
        "segments": [
            _segment(segment, list(stretch), frames)
            for segment in allocator.segments()
            for is_mapped, stretch in groupby(segment.blocks(), lambda block: block.state != UNMAPPED)
            if is_mapped
        ],
        "device_traces": [history.described(frames)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": config.to_string(),
            "max_split_size": _NO_MAX_SPLIT if config.max_split_size is None else config.max_split_size,
            "expandable_segments": config.expandable_segments,
        },
        "external_annotations": [],
    }


def write_snapshot(snapshot: dict[str, Any], path: str | Path) -> None:
    """Write a snapshot, simulated or torch's own, to a file that can be dropped on https://pytorch.org/memory_viz."""
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)


def _frames(label: str | None) -> list[dict[str, str | int]]:
    return [_frame(line) for line in (label or "").splitlines()]


def _frame(line: str) -> dict[str, str | int]:
    match = _FRAME.fullmatch(line)
    if match is None:
        return {"filename": "", "line": 0, "name": line}
    return {"filename": match["filename"], "line": int(match["line"]), "name": match["name"]}


def _segment(segment: Segment, blocks: list[Block], frames: Callable[[str | None], list[Any]]) -> dict[str, Any]:
    active = [block for block in blocks if block.allocated]
    allocated = sum(block.size for block in active)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in active),
        "stream": segment.free_blocks.stream,
        "segment_type": "small" if segment.free_blocks.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.page_size is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.allocated else 0,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": frames(block.label) if block.allocated else [],
            }
            for block in blocks
        ],
    }


# --- from a snapshot back to a trace


def config_of(snapshot: Mapping[str, Any]) -> AllocatorConfig:
    """Return the allocator's settings from a snapshot. If it has none, read this process's PYTORCH_ALLOC_CONF."""
    recorded = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF")
    text = recorded or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return AllocatorConfig.parse(text)
    except ValueError:  # settings of another backend, or newer than this library
        return AllocatorConfig()


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed because the device had too little memory, and the trace of all requests before it.

    Attributes:
        trace: The requests before the failed request. Blocks that are older than the history come first, in address
            order, because the order of their allocations is not known.
        n_bytes: The size of the failed request, as rounded up by the allocator.
        stream: The stream of the failed request, as numbered in `trace`.
        is_complete: Whether the allocator held no blocks when the history began.
    """

    trace: AllocationTrace
    n_bytes: int
    stream: int
    is_complete: bool


def failed_request(
    snapshot: Mapping[str, Any],
    config: AllocatorConfig,
    *,
    capacity: int | None,
    used_by_others: int,
    device: int = 0,
) -> FailedRequest | None:
    """Return the last request in a snapshot's history that failed for lack of memory; None if no request failed.

    Args:
        snapshot: The result of `torch.cuda.memory._snapshot` or `take_snapshot`.
        config: The allocator's settings.
        capacity: The memory of the device in bytes; None for no limit.
        used_by_others: The bytes of the device that were held outside of the allocator.
        device: The device's index.
    """
    entries = snapshot["device_traces"][device]
    last = max((at for at, entry in enumerate(entries) if entry["action"] == "oom"), default=None)
    if last is None:
        return None
    writer = _TraceWriter(snapshot, AllocationTrace(config, capacity=capacity, used_by_others=used_by_others), device)
    is_complete = not len(writer.trace)
    for entry in entries[:last]:
        writer.add(entry)
    failed = entries[last]
    return FailedRequest(writer.trace, failed["size"], writer.stream_of(failed), is_complete)


def trace_until(
    snapshot: Mapping[str, Any],
    config: AllocatorConfig,
    *,
    capacity: int | None,
    used_by_others: int,
    until: int,
    device: int = 0,
) -> AllocationTrace:
    """Return a trace of all requests before the time `until`, a value of `time_us` in the snapshot's history.

    If segments were released directly after `until`, to make room for the next request, the trace includes this.
    """
    writer = _TraceWriter(snapshot, AllocationTrace(config, capacity=capacity, used_by_others=used_by_others), device)
    for entry in snapshot["device_traces"][device]:
        if entry["time_us"] >= until and entry["action"] not in _RELEASES:
            break
        writer.add(entry)
    return writer.trace


def begin_of(snapshot: Mapping[str, Any], device: int = 0) -> int | None:
    """Return the time (`time_us`) of the first action in a snapshot's history; None if the history is empty."""
    entries = snapshot["device_traces"][device]
    return entries[0]["time_us"] if entries else None


class _TraceWriter:
    """Converts a memory snapshot to an `AllocationTrace`. Blocks that are older than the recorded history come first.

    A block counts as freed once the streams that use it have finished with it. A private pool becomes a separate stream
    of the trace: like streams, pools do not share free blocks.
    """

    def __init__(self, snapshot: Mapping[str, Any], trace: AllocationTrace, device: int) -> None:
        self.trace = trace
        self._number_at: dict[int, int] = {}
        self._n_allocations = 0
        self._streams: dict[Any, int] = {(0, (0, 0)): 0}
        self._released = False
        live = live_at_start(snapshot, snapshot["device_traces"][device], device)
        for address, block in sorted(live.items()):
            self._malloc(address, block.n_bytes, self._stream(block.stream, block.pool))

    def add(self, entry: Mapping[str, Any]) -> None:
        action = entry["action"]
        if action in _RELEASES:
            # Emptying the cache, by the program or before a request fails, releases all of it at once.
            if not self._released:
                self.trace.add(TraceEventKind.EMPTY_CACHE)
            self._released = True
            return
        self._released = False
        if action == "alloc":
            self._malloc(entry["addr"], entry["size"], self.stream_of(entry))
        elif action == "free_completed" and entry["addr"] in self._number_at:
            self.trace.add(TraceEventKind.FREE, self._number_at.pop(entry["addr"]))
        elif action == "oom":
            self.trace.add_failed_malloc(entry["size"], self.stream_of(entry), None)

    def stream_of(self, entry: Mapping[str, Any]) -> int:
        return self._stream(entry["stream"], entry.get("pool_id"))

    def _stream(self, stream: int, pool_id: Any) -> int:
        return self._streams.setdefault((stream, tuple(pool_id or (0, 0))), len(self._streams))

    def _malloc(self, address: int, n_bytes: int, stream: int) -> None:
        self._n_allocations += 1
        self._number_at[address] = self._n_allocations
        self.trace.add_malloc(n_bytes, stream, None)
