"""Snapshots in the form of torch.cuda.memory._snapshot(), which pytorch.org/memory_viz and torch's own tools read.

The keys and values are those that torch/csrc/cuda/memory_snapshot.cpp writes. Its blocks that wait for another stream
are "active_pending_free", as the viewer expects, although the docstring of ``_snapshot`` names another state.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_memtools.memory.allocator.blocks import ALLOCATED, FREE, UNMAPPED, WAITING, Block, FreeBlocks, Segment
from lightning_memtools.memory.allocator.caching import CachingAllocator
from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.replay import replay
from lightning_memtools.memory.allocator.rounding import ROUNDUP_INTERVALS
from lightning_memtools.memory.allocator.trace import Trace

_STATES = {ALLOCATED: "active_allocated", WAITING: "active_pending_free", FREE: "inactive"}
_FRAME = re.compile(r"(?P<filename>.+):(?P<line>\d+):(?P<name>.*)")
# What torch writes for no limit: the largest size_t, read as a signed number.
_NO_MAX_SPLIT = -1
_NO_ROUNDUP = (0,) * ROUNDUP_INTERVALS
# The viewer reads pickles up to this protocol, Python 3.14 writes newer ones unless told otherwise.
_PICKLE_PROTOCOL = 4


class History:
    """The last actions of an allocator, as torch's own recording keeps them; give it to the allocator as an observer.

    Args:
        max_entries: How many to keep; None for all.

    Attributes:
        count: How many there ever were.
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
        """The actions as torch's snapshots describe them."""
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


def take_snapshot(allocator: CachingAllocator, history: History | None = None) -> dict[str, Any]:
    """Describe an allocator's segments and blocks, and its history: the one given, or that of the trace it records.

    A label becomes the stack of its block: a line of the form ``file:line:function`` one frame, any other line a frame
    with that name. Times in the history count actions, since no time passes here.

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
    allocator: CachingAllocator, history: History | None, frames: Callable[[str | None], list[Any]]
) -> list[dict[str, Any]]:
    if history is not None:
        return history.described(frames)
    return [] if allocator.trace is None else _history(allocator.trace, frames)


def _history(trace: Trace, frames: Callable[[str | None], list[Any]]) -> list[dict[str, Any]]:
    history = History()
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
