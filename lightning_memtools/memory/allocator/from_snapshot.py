"""From a memory snapshot, torch's own or a simulated one, back to a trace that can be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.allocator.config import AllocatorConfig
from lightning_memtools.memory.allocator.trace import Kind, Trace

_GIVES_BACK = {"segment_free", "segment_unmap"}
_IN_USE = {"active_allocated", "active_pending_free", "active_awaiting_free"}


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The last request of a history that found no memory, and the trace of all that was asked before it.

    Attributes:
        trace: What the program had asked until then. Blocks that are older than the history come first, by address:
            where they lay among blocks that are gone is not known.
        n_bytes: What it asked for, as the allocator rounds it.
        stream: For which stream.
        pool: From which pool, by its number in the trace.
        is_complete: Whether the history goes back to an empty device.
    """

    trace: Trace
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
    empty_cache_at: int | None = None,
) -> FailedRequest | None:
    """Read the last out-of-memory error of a snapshot's history; None where the history holds none.

    Streams are not followed: a block is free from when its streams were done with it.

    Args:
        snapshot: What `torch.cuda.memory._snapshot` or `take_snapshot` gave.
        config: The allocator's settings.
        capacity: The device's, in bytes; None for no limit.
        used_by_others: Bytes that others than the allocator held of it.
        device: The device's index.
        empty_cache_at: Add an emptying of the cache before the first action at this time (`time_us`) or later.
    """
    entries: Sequence[Mapping[str, Any]] = snapshot["device_traces"][device]
    last = max((at for at, entry in enumerate(entries) if entry["action"] == "oom"), default=None)
    if last is None:
        return None
    writer = _begun(snapshot, Trace(config, capacity=capacity, used_by_others=used_by_others), device)
    is_complete = not len(writer.trace)
    emptied = empty_cache_at is None
    for entry in entries[:last]:
        if not emptied and entry["time_us"] >= (empty_cache_at or 0):
            writer.trace.add(Kind.EMPTY_CACHE)
            emptied = True
        writer.add(entry)
    if not emptied:
        writer.trace.add(Kind.EMPTY_CACHE)
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
) -> Trace:
    """All that was asked before a time (`time_us`), and what was given back to the device right after it.

    The other arguments are those of `failed_request`.
    """
    writer = _begun(snapshot, Trace(config, capacity=capacity, used_by_others=used_by_others), device)
    for entry in snapshot["device_traces"][device]:
        if entry["time_us"] >= until and entry["action"] not in _GIVES_BACK:
            break
        writer.add(entry)
    return writer.trace


def _begun(snapshot: Mapping[str, Any], trace: Trace, device: int) -> _Writer:
    """A trace that begins with what was in use when the history begins."""
    writer = _Writer(trace)
    live = _live_at_start(snapshot, snapshot["device_traces"][device], device)
    for address in sorted(live):
        writer.malloc(address, *live[address])
    return writer


def begin_of(snapshot: Mapping[str, Any], device: int = 0) -> int | None:
    """The time (`time_us`) of the first action that a history still holds; None where it holds none."""
    entries = snapshot["device_traces"][device]
    return entries[0]["time_us"] if entries else None


class _Writer:
    """Writes a trace of blocks that are known by their addresses."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._number_at: dict[int, int] = {}
        self._n_allocations = 0
        self._pools: dict[Any, int] = {(0, 0): 0}
        self._gave_back = False

    def add(self, entry: Mapping[str, Any]) -> None:
        action = entry["action"]
        if action in _GIVES_BACK:
            # Memory goes back when the cache is emptied, by the program or before a request fails: all of it at once.
            if not self._gave_back:
                self.trace.add(Kind.EMPTY_CACHE)
            self._gave_back = True
            return
        self._gave_back = False
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


def _live_at_start(
    snapshot: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], device: int
) -> dict[int, tuple[int, int, Any]]:
    """Address to bytes, stream and pool of what was in use when the history begins: the end, undone step by step."""
    live: dict[int, tuple[int, int, Any]] = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in _IN_USE:
                n_bytes = block.get("requested_size") or block["size"]
                live[block.get("address", address)] = (n_bytes, segment["stream"], segment.get("segment_pool_id"))
            address += block["size"]
    for entry in reversed(entries):
        if entry["action"] == "alloc":
            live.pop(entry["addr"], None)
        elif entry["action"] == "free_completed":
            live[entry["addr"]] = (entry["size"], entry["stream"], entry.get("pool_id"))
    return live
