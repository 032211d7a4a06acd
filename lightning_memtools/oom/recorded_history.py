"""The recorded history of the allocator, replayed under other settings.

A replay tells whether the failed request would have found memory: then memory was there, and only lay in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory, replay
from lightning_memtools.memory.allocator.block_rounding import SMALL_LIMIT, SMALL_SEGMENT, round_up
from lightning_memtools.memory.allocator.memory_snapshot import (
    FailedRequest,
    begin_of,
    config_of,
    failed_request,
    trace_until,
)
from lightning_memtools.memory.sizes import format_size

EXPANDABLE = 'PYTORCH_ALLOC_CONF="expandable_segments:True"'


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """The result of a replay under another setting.

    Attributes:
        served: True if the request would have found memory; None where that is not known.
        why: The reason in words.
    """

    served: bool | None
    why: str


@dataclass(frozen=True)
class RecordedHistory:
    """A recorded history that ends with a request for which there was no memory, and the device it was recorded on.

    Attributes:
        snapshot: A snapshot as `torch.cuda.memory._snapshot` or `take_snapshot` returns it.
        config: The allocator's settings.
        capacity: The capacity of the device in bytes.
        used_by_others: Bytes held by others than the allocator.
        device: The device's index in the snapshot.
    """

    snapshot: Mapping[str, Any]
    config: AllocatorConfig
    capacity: int
    used_by_others: int
    device: int = 0

    @cached_property
    def failed(self) -> FailedRequest | None:
        """The request that found no memory; None where the history does not hold it."""
        return failed_request(
            self.snapshot,
            self.config,
            capacity=self.capacity,
            used_by_others=self.used_by_others,
            device=self.device,
        )

    @cached_property
    def problem(self) -> str:
        """The reason why the history allows no conclusion; "" where it does."""
        failed = self.failed
        if failed is None:
            return "the recorded history does not hold the failed request"
        if not _replayed(failed, self.config).served:
            return ""
        # Where a history is cut off, its oldest blocks are placed by guess, which may be better than they really were.
        if not failed.is_complete:
            return "the recorded history does not reach back far enough to show how the memory was fragmented"
        return "the failed request is not reproduced by the recorded history"

    def allocator_at(self, time: int) -> CachingAllocator | None:
        """Return the allocator as it was at a time of the history; None where that is not known."""
        begin = begin_of(self.snapshot, self.device)
        if begin is None or begin > time:
            return None
        trace = trace_until(
            self.snapshot,
            self.config,
            capacity=self.capacity,
            used_by_others=self.used_by_others,
            until=time,
            device=self.device,
        )
        done = replay(trace)
        return done.allocator if done.completed else None

    def with_expandable_segments(self) -> ReplayVerdict:
        """Return whether the request would have been served with ``expandable_segments:True``."""
        if self.config.expandable_segments and self.failed is not None:
            return ReplayVerdict(served=False, why="expandable segments are on already")
        return self._verdict(replace(self.config, expandable_segments=True))

    def with_more_memory(self, n_bytes: int) -> ReplayVerdict:
        """Return whether the request would have been served if others had held `n_bytes` less of the device."""
        return self._verdict(self.config, more=n_bytes)

    def _verdict(self, config: AllocatorConfig, *, more: int = 0) -> ReplayVerdict:
        if self.problem or self.failed is None:
            return ReplayVerdict(served=None, why=self.problem)
        return _replayed(self.failed, config, more=more)


def _replayed(failed: FailedRequest, config: AllocatorConfig, *, more: int = 0) -> ReplayVerdict:
    """Return whether a failed request would have been served under other settings, or with more memory."""
    trace = failed.trace
    done = replay(trace, config=config, capacity=None if trace.capacity is None else trace.capacity + more)
    if done.out_of_memory is not None:
        return ReplayVerdict(served=False, why="memory would have run out even earlier")
    try:
        done.allocator.malloc(failed.n_bytes, stream=failed.stream, pool=failed.pool)
    except SimulatedOutOfMemory as error:
        page = config.large_segment_size if error.rounded > SMALL_LIMIT else SMALL_SEGMENT
        needed = round_up(error.rounded, page) if config.expandable_segments else error.segment_size
        free = format_size(max(error.free or 0, 0))
        why = f"only {free} would have been free for the request of {format_size(error.rounded)}"
        if needed > error.rounded:
            why += f", which needs a segment of {format_size(needed)}"
        return ReplayVerdict(served=False, why=why)
    return ReplayVerdict(served=True, why="the request would have been served")


def failed_request_in_words(snapshot: Mapping[str, Any], device: int = 0) -> list[str]:
    """Return whether expandable segments would have served the request that failed in a snapshot; [] without one.

    The limit is what the allocator held at that moment and the bytes that the device had left.
    """
    entries = snapshot["device_traces"][device]
    failed = next((entry for entry in reversed(entries) if entry["action"] == "oom"), None)
    if failed is None:
        return []
    config = config_of(snapshot)
    until = trace_until(snapshot, config, capacity=None, used_by_others=0, until=failed["time_us"], device=device)
    reserved = replay(until).stats.reserved or 0
    history = RecordedHistory(snapshot, config, reserved + failed.get("device_free", 0), 0, device)
    if history.failed is None:
        return []
    verdict = history.with_expandable_segments()
    words = {True: "would have served it", False: "does not help: {}", None: "may or may not help: {}"}[verdict.served]
    request = f"A request of {format_size(history.failed.n_bytes)} found no memory."
    return [request, f"{EXPANDABLE} {words.format(verdict.why)}."]
