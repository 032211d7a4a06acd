"""Fragmentation: settings under which a failed request would have been served, and what pins half-empty segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_memtools.memory.allocator import AllocatorConfig, replay
from lightning_memtools.memory.allocator.block_rounding import SMALL_LIMIT
from lightning_memtools.memory.allocator.memory_snapshot import config_of, failed_request, trace_until
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.user_code import CodeLine, owner_of
from lightning_memtools.oom.recorded_history import RecordedHistory, ReplayVerdict, replayed

EXPANDABLE = "expandable_segments:True"
SETTINGS = (
    EXPANDABLE,
    "max_split_size_mb:64",
    "max_split_size_mb:256",
    "max_split_size_mb:1024",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.8",
)
"""The settings that are tried, one at a time."""
IN_PIECES = 0.2
"""As a share of what is reserved: so much that is free in pieces is fragmentation."""
_MOST_BLOCKS = 5
# As a share of a segment.
_HALF_EMPTY = 0.4


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A segment that is half empty, and cannot be released for the blocks in use in it.

    Attributes:
        free_bytes: Its free bytes.
        n_bytes: Its size.
        used_bytes: The bytes of the blocks in use.
        made_at: The line or module that made the largest of these; "" where it is not known.
        address: The address of the largest of these; None where it is not known.
    """

    free_bytes: int
    n_bytes: int
    used_bytes: int
    made_at: str
    address: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        made = f", made {self.made_at}" if self.made_at else ""
        return (
            f"{format_size(self.free_bytes)} of a segment of {format_size(self.n_bytes)}, for blocks of "
            f"{format_size(self.used_bytes)}{made}"
        )


def with_setting(history: RecordedHistory, setting: str) -> ReplayVerdict:
    """Return whether the failed request would have been served with a setting of PYTORCH_ALLOC_CONF."""
    if history.problem or history.failed is None:
        return ReplayVerdict(served=None, why=history.problem)
    return replayed(history.failed, changed(history.config, setting))


def changed(config: AllocatorConfig, setting: str) -> AllocatorConfig:
    """Return settings with one changed."""
    plain, new = AllocatorConfig(), AllocatorConfig.parse(setting)
    return replace(
        config,
        **{
            one.name: getattr(new, one.name)
            for one in fields(AllocatorConfig)
            if getattr(new, one.name) != getattr(plain, one.name)
        },
    )


def settings_that_serve(history: RecordedHistory, check: Callable[[], None]) -> Iterator[tuple[str, ReplayVerdict]]:
    """Yield the verdict on each setting; `check` is called before each and may raise where the time is over."""
    for setting in SETTINGS:
        if changed(history.config, setting) != history.config:
            check()
            yield setting, with_setting(history, setting)


def pinned_segments(snapshot: Mapping[str, Any], device: int = 0) -> list[PinnedSegment]:
    """Return the large segments that are about half empty or more and in use nevertheless, the emptiest first."""
    found = []
    for segment in snapshot["segments"]:
        used = [block for block in segment["blocks"] if block["state"] != "inactive"]
        free = segment["total_size"] - sum(block["size"] for block in used)
        is_large = segment["device"] == device and segment["total_size"] > SMALL_LIMIT
        if is_large and used and free > _HALF_EMPTY * segment["total_size"] and not segment.get("is_expandable"):
            largest = max(used, key=lambda block: block["size"])
            used_bytes = segment["total_size"] - free
            made_at = maker(largest.get("frames") or ())
            found.append(PinnedSegment(free, segment["total_size"], used_bytes, made_at, largest.get("address")))
    return sorted(found, key=lambda one: -one.free_bytes)[:_MOST_BLOCKS]


def maker(frames: Any) -> str:
    """Return where a block was allocated, read off its recorded stack; "" where that is not known.

    It is the innermost line of the user's code, such as "at train.py:31". A simulated device records modules in place
    of lines, such as "in net.0".
    """
    for frame in frames:
        file, name = frame["filename"], frame["name"]
        if file and owner_of(file) == "user" and file.endswith(".py"):
            return f"at {CodeLine(file, frame['line'], name)}"
        if not file and not name.startswith("("):
            return f"in {name}"
    return ""


def history_of(snapshot: Mapping[str, Any], device: int = 0) -> RecordedHistory | None:
    """Return the history of a snapshot of torch's or ours that holds a failed request; None where it holds none.

    The limit is what the allocator held at that moment and the bytes that the device had left.
    """
    entries = snapshot["device_traces"][device] if device < len(snapshot["device_traces"]) else ()
    failed = next((entry for entry in reversed(entries) if entry["action"] == "oom"), None)
    config = config_of(snapshot)
    if failed is None or failed_request(snapshot, config, capacity=None, used_by_others=0, device=device) is None:
        return None
    until = trace_until(snapshot, config, capacity=None, used_by_others=0, until=failed["time_us"], device=device)
    reserved = replay(until).stats.reserved or 0
    return RecordedHistory(snapshot, config, reserved + failed.get("device_free", 0), 0, device)


def fragmentation_in_words(snapshot: Mapping[str, Any], device: int = 0) -> list[str]:
    """Return what a snapshot says of the request that failed in it: which settings would have served it, and pins."""
    history = history_of(snapshot, device)
    if history is None or history.failed is None:
        return []
    lines = [f"A request of {format_size(history.failed.n_bytes)} found no memory."]
    if history.problem:
        return [*lines, f"Whether a setting would have helped is not known: {history.problem}."]
    for setting, verdict in settings_that_serve(history, lambda: None):
        served = f"it would have been served, with {format_size(verdict.reserved)} reserved"
        helps = served if verdict.served else f"does not help: {verdict.why}"
        lines.append(f'PYTORCH_ALLOC_CONF="{setting}": {helps}.')
    pins = pinned_segments(snapshot, device)
    lines += [f"Pinned: {one}." for one in pins]
    return lines
