"""Memory snapshots: written as torch.cuda.memory._snapshot() writes them, and read back into a trace for replay.

https://pytorch.org/memory_viz and torch's own tools read what is written; what is read may be torch's own.

The keys and values are those that torch/csrc/cuda/memory_snapshot.cpp writes. Its blocks that wait for another stream
are "active_pending_free", as the viewer expects, although the docstring of ``_snapshot`` names another state.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memtools.memory.allocator.allocation_trace import AllocationTrace, TraceEventKind
from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig
from lightning_memtools.memory.allocator.blocks import ALLOCATED, FREE, UNMAPPED, WAITING, Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.caching_allocator import CachingAllocator
from lightning_memtools.memory.allocator.trace_replay import replay
from lightning_memtools.tensorboard_plugin.snapshot_file import live_at_start

_STATES = {ALLOCATED: "active_allocated", WAITING: "active_pending_free", FREE: "inactive"}
_FRAME = re.compile(r"(?P<filename>.+):(?P<line>\d+):(?P<name>.*)")
# torch writes the largest size_t for no limit, which is read as a signed number.
_NO_MAX_SPLIT = -1
# The viewer reads pickles up to this protocol; Python 3.14 writes newer ones by default.
_PICKLE_PROTOCOL = 4
_RELEASES = {"segment_free", "segment_unmap"}


class AllocatorHistory:
    """The last actions of an allocator, as torch's own recording keeps them; give it to the allocator as an observer.

    Args:
        max_entries: The number of actions to keep; None for all.

    Attributes:
        count: The number of all actions so far.
    """

    def __init__(self, max_entries: int | None = None) -> None:
        self.count = 0
        self._entries: deque[tuple[str, int, int, int, int, str | None]] = deque(maxlen=max_entries)

    def __call__(self, action: str, address: int, size: int, free_blocks: FreeBlocks, label: str | None) -> None:
        """Keep an action."""
        self.count += 1
        self._entries.append((action, address, size, free_blocks.stream, free_blocks.pool, label))

    def __len__(self) -> int:
        return len(self._entries)

    def described(self, frames: Callable[[str | None], list[Any]]) -> list[dict[str, Any]]:
        """Return the actions as torch's snapshots describe them."""
        first = self.count - len(self._entries)
        return [
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "pool_id": (0, pool),
                "time_us": first + at,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames(label),
            }
            for at, (action, address, size, stream, pool, label) in enumerate(self._entries)
        ]


def take_snapshot(allocator: CachingAllocator, history: AllocatorHistory | None = None) -> dict[str, Any]:
    """Describe an allocator's segments and blocks, and its history: the given one, or that of its trace.

    A label becomes the stack of its block: each line of the form ``file:line:function`` becomes a frame, and any other
    line a frame with that name. Times in the history count actions, since no time passes in the simulation.

    Returns:
        A dictionary with "segments", "device_traces" (of one device, 0), "allocator_settings" and
        "external_annotations".
    """
    frames = _Frames()
    return {
        "segments": _segments(allocator, frames),
        "device_traces": [_device_trace(allocator, history, frames)],
        "allocator_settings": _settings(allocator.config),
        "external_annotations": [],
    }


def save_snapshot(allocator: CachingAllocator, path: str | Path) -> None:
    """Write `take_snapshot` to a file that can be dropped on https://pytorch.org/memory_viz."""
    write_snapshot(take_snapshot(allocator), path)


def write_snapshot(snapshot: dict[str, Any], path: str | Path) -> None:
    """Write a snapshot, simulated or torch's own, to a file that the viewer reads."""
    with Path(path).open("wb") as file:
        pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)


class _Frames:
    """Turns labels into frames, each label once: a history repeats few labels very often."""

    def __init__(self) -> None:
        self._of_label: dict[str, list[dict[str, str | int]]] = {}

    def __call__(self, label: str | None) -> list[dict[str, str | int]]:
        if label is None:
            return []
        if label not in self._of_label:
            self._of_label[label] = [_frame(line) for line in label.splitlines()]
        return self._of_label[label]


def _frame(line: str) -> dict[str, str | int]:
    match = _FRAME.fullmatch(line)
    if match is None:
        return {"filename": "", "line": 0, "name": line}
    return {"filename": match["filename"], "line": int(match["line"]), "name": match["name"]}


def _segments(allocator: CachingAllocator, frames: Callable[[str | None], list[Any]]) -> list[dict[str, Any]]:
    described = []
    for segment in allocator.segments():
        # An expandable segment is shown as the stretches that have memory behind them.
        stretch: list[Block] = []
        for block in segment.blocks():
            if block.state != UNMAPPED:
                stretch.append(block)
            elif stretch:
                described.append(_segment(segment, stretch, frames))
                stretch = []
        if stretch:
            described.append(_segment(segment, stretch, frames))
    return described


def _segment(segment: Segment, blocks: list[Block], frames: Callable[[str | None], list[Any]]) -> dict[str, Any]:
    free_blocks = segment.free_blocks
    active = [block for block in blocks if block.state in {ALLOCATED, WAITING}]
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.state == ALLOCATED),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": free_blocks.stream,
        "segment_type": "small" if free_blocks.is_small else "large",
        "segment_pool_id": (0, free_blocks.pool),
        "is_expandable": segment.page_size is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.state in {ALLOCATED, WAITING} else 0,
                "state": _STATES[block.state],
                "frames": frames(block.label) if block.state in {ALLOCATED, WAITING} else [],
            }
            for block in blocks
        ],
    }


def _device_trace(
    allocator: CachingAllocator, history: AllocatorHistory | None, frames: Callable[[str | None], list[Any]]
) -> list[dict[str, Any]]:
    if history is not None:
        return history.described(frames)
    return [] if allocator.trace is None else _history(allocator.trace, frames)


def _history(trace: AllocationTrace, frames: Callable[[str | None], list[Any]]) -> list[dict[str, Any]]:
    history = AllocatorHistory()
    replay(trace, observer=history)
    return history.described(frames)


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.to_string(),
        "max_split_size": _NO_MAX_SPLIT if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(2**interval): divisions
            for interval, divisions in enumerate(config.roundup_power2_divisions or (0,) * 16)
        },
    }


# --- from a snapshot back to a trace


def config_of(snapshot: Mapping[str, Any]) -> AllocatorConfig:
    """Return the settings of the allocator that a snapshot is of; where it has none, those of this process."""
    recorded = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF")
    text = recorded or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return AllocatorConfig.parse(text)
    except ValueError:  # settings of another backend, or newer than this library
        return AllocatorConfig()


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The last request of a history for which there was no memory, and the trace of all requests before it.

    Attributes:
        trace: The requests of the program until then. Blocks that are older than the history come first, by address:
            their position among blocks that were freed is not known.
        n_bytes: The requested size, as the allocator rounds it.
        stream: The stream of the request.
        pool: The pool of the request, by its number in the trace.
        is_complete: Whether the history goes back to an empty device.
    """

    trace: AllocationTrace
    n_bytes: int
    stream: int
    pool: int
    is_complete: bool


def failed_request(
    snapshot: Mapping[str, Any],
    config: AllocatorConfig,
    *,
    capacity: int | None,
    used_by_others: int,
    device: int = 0,
) -> FailedRequest | None:
    """Return the last out-of-memory error of a snapshot's history; None where the history holds none.

    Streams are not simulated: a block is free as soon as its streams have finished with it.

    Args:
        snapshot: The result of `torch.cuda.memory._snapshot` or `take_snapshot`.
        config: The allocator's settings.
        capacity: The memory of the device in bytes; None for no limit.
        used_by_others: The bytes of it that others than the allocator held.
        device: The device's index.
    """
    entries: Sequence[Mapping[str, Any]] = snapshot["device_traces"][device]
    last = max((at for at, entry in enumerate(entries) if entry["action"] == "oom"), default=None)
    if last is None:
        return None
    writer = _started_writer(
        snapshot, AllocationTrace(config, capacity=capacity, used_by_others=used_by_others), device
    )
    is_complete = not len(writer.trace)
    for entry in entries[:last]:
        writer.add(entry)
    failed = entries[last]
    return FailedRequest(writer.trace, failed["size"], failed["stream"], writer.pool_of(failed), is_complete)


def trace_until(
    snapshot: Mapping[str, Any],
    config: AllocatorConfig,
    *,
    capacity: int | None,
    used_by_others: int,
    until: int,
    device: int = 0,
) -> AllocationTrace:
    """Return all requests before a time (`time_us`), and the releases to the device right after it.

    The other arguments are those of `failed_request`.
    """
    writer = _started_writer(
        snapshot, AllocationTrace(config, capacity=capacity, used_by_others=used_by_others), device
    )
    for entry in snapshot["device_traces"][device]:
        if entry["time_us"] >= until and entry["action"] not in _RELEASES:
            break
        writer.add(entry)
    return writer.trace


def _started_writer(snapshot: Mapping[str, Any], trace: AllocationTrace, device: int) -> _Writer:
    """Return the writer of a trace that starts with the blocks in use when the history begins."""
    writer = _Writer(trace)
    live = live_at_start(snapshot, snapshot["device_traces"][device], device)
    for address in sorted(live):
        block = live[address]
        writer.malloc(address, block.n_bytes, block.stream, block.pool)
    return writer


def begin_of(snapshot: Mapping[str, Any], device: int = 0) -> int | None:
    """Return the time (`time_us`) of the first action that a history still holds; None where it holds none."""
    entries = snapshot["device_traces"][device]
    return entries[0]["time_us"] if entries else None


class _Writer:
    """Writes the trace of blocks that are identified by their addresses."""

    def __init__(self, trace: AllocationTrace) -> None:
        self.trace = trace
        self._number_at: dict[int, int] = {}
        self._n_allocations = 0
        self._pools: dict[Any, int] = {(0, 0): 0}
        self._released = False

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
            self.malloc(entry["addr"], entry["size"], entry["stream"], entry.get("pool_id"))
        elif action == "free_completed":
            number = self._number_at.pop(entry["addr"], None)
            if number is not None:
                self.trace.add_free(number)
        elif action == "oom":
            self.trace.add_failed_malloc(entry["size"], entry["stream"], self.pool_of(entry), None)

    def malloc(self, address: int, n_bytes: int, stream: int, pool_id: Any) -> None:
        self._n_allocations += 1
        self._number_at[address] = self._n_allocations
        self.trace.add_malloc(n_bytes, stream, self._pool(pool_id), None)

    def pool_of(self, entry: Mapping[str, Any]) -> int:
        return self._pool(entry.get("pool_id"))

    def _pool(self, pool_id: Any) -> int:
        if pool_id is None:
            return 0
        return self._pools.setdefault(tuple(pool_id), len(self._pools))
