"""Reads memory snapshots, torch's or ours, safely from files of strangers, and reconstructs their initial state."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_IN_USE = {"active_allocated", "active_pending_free", "active_awaiting_free"}


class NotASnapshotError(Exception):
    """Raised if a file is not a memory snapshot. The message says why."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only containers, numbers and strings. Any other type raises an error, because it could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise NotASnapshotError(f"it wants to load {module_name}.{global_name}, which no snapshot holds")


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read a memory snapshot. This never runs code from the file, so the file need not be trusted.

    Raises:
        NotASnapshotError: The file cannot be read, or is not a memory snapshot.
    """
    try:
        with path.open("rb") as file:
            snapshot: Any = _PlainUnpickler(file).load()
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= set(snapshot):
            raise NotASnapshotError("it has no segments and device_traces")  # noqa: TRY301, described below
    except OSError as error:
        raise NotASnapshotError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # bytes that are no pickle raise errors of a dozen classes
        why = error if isinstance(error, NotASnapshotError) else f"it is no pickle ({type(error).__name__})"
        raise NotASnapshotError(
            f"{path} is no memory snapshot: {why}. Give a file that torch.cuda.memory._dump_snapshot or "
            "MemoryMonitor(snapshot_at_step=...) wrote."
        ) from error
    return snapshot


class LiveBlock(NamedTuple):
    """A block that is in use when the recorded history begins.

    Attributes:
        n_bytes: The number of bytes that were requested.
        stream: The stream that the block belongs to.
        pool: The id of the block's memory pool in the snapshot.
        source: The part of the snapshot that describes the block: its entry in a segment, or in the history.
    """

    n_bytes: int
    stream: int
    pool: Any
    source: Mapping[str, Any]


def live_at_start(
    snapshot: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], device: int
) -> dict[int, LiveBlock]:
    """Return the blocks in use when the history begins, by address. Undoes the history, starting at its end."""
    live: dict[int, LiveBlock] = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in _IN_USE:
                n_bytes = block.get("requested_size") or block["size"]
                live[block.get("address", address)] = LiveBlock(
                    n_bytes, segment["stream"], segment.get("segment_pool_id"), block
                )
            address += block["size"]
    for entry in reversed(entries):
        if entry["action"] == "alloc":
            live.pop(entry["addr"], None)
        elif entry["action"] == "free_completed":
            live[entry["addr"]] = LiveBlock(entry["size"], entry["stream"], entry.get("pool_id"), entry)
    return live
