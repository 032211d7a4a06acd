"""A memory snapshot as a timeline: the composition of memory after each event, and who holds the peak."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError, live_at_start, read_snapshot

_NAME = re.compile(r"memory_snapshot_step(\d+)_rank(\d+)\.pickle")
# Such a file takes a server minutes and gigabytes.
_MOST_BYTES = 1 << 28
PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "other")
_COLUMNS = 800
_MOST_TOP = 10
_MOST_FRAMES = 24
_GRANULE = 512
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_BORN_IN = {"forward": "activations", "backward": "temporaries", "optimizer": "temporaries"}
_BY_MODULE = {"activations", "temporaries"}
_REST, _ALL = "everything else", "allocated"
_NO_MARKS: dict[str, Any] = {"phases": [], "owned": [], "step": None, "rank": None}


@dataclass(slots=True)
class BlockLife:
    """A memory block, from its allocation until it is freed.

    Attributes:
        born: The number of the event that allocated the block, counted from 1; 0 if the block predates the history.
        died: The number of the event that freed the block; None if the block was in use at the end.
        size: The size in bytes.
        stack: The stack frames of the allocation, innermost first; empty if unknown.
        label: The label of the allocation, which names the phase and the module; "" without a label.
        part: The category of memory, such as "gradients"; "allocated" if categories are unknown.
        name: The name of the tensor in the block, such as "net.1.weight"; empty if unknown.
    """

    born: int
    died: int | None
    size: int
    stack: tuple[str, ...]
    label: str
    part: str = ""
    name: str = ""

    def is_alive(self, event: int) -> bool:
        """Return True if the block is in use right after the event with this number."""
        return self.born <= event and (self.died is None or self.died > event)


def timeline_from(path: Path) -> dict[str, Any]:
    """Return the timeline of memory in a snapshot file, as a dict for JSON.

    A snapshot that MemoryMonitor wrote is shown as one step, divided into categories of memory. Any other snapshot is
    shown as a whole, with the lines of code that allocated the memory in use at the peak.

    Raises:
        NotASnapshotError: The file is not a snapshot, or its entries are inconsistent.
    """
    snapshot = read_snapshot(path)
    try:
        return _timeline(snapshot)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotASnapshotError(f"{path} is no memory snapshot: its entries make no sense ({error}).") from error


def _timeline(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    used = (index for index, trace in enumerate(snapshot["device_traces"]) if trace)
    # What MemoryMonitor adds to its snapshot of a step, or what stands for it in any other snapshot.
    marks = _NO_MARKS | {"device": next(used, 0)} | snapshot.get("memtools", {})
    device = marks["device"]
    entries: Sequence[Mapping[str, Any]] = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    phases = [(_event_at(entries, time), str(name)) for time, name in marks["phases"]]
    owned = [(_event_at(entries, time), addresses) for time, addresses in marks["owned"]]
    is_marked = bool(owned)
    blocks = _blocks_of(snapshot, entries, device, owned)
    for block in blocks:
        block.part = (block.part or _part_of(block, phases)) if is_marked else _ALL
    total, reserved = _totals(blocks, len(entries)), _reserved(snapshot, entries, device)
    peak = total.index(max(total))
    at_peak = [block for block in blocks if block.is_alive(peak)]
    names = [name for name in (*PARTS, _ALL) if any(block.part == name for block in blocks)]
    columns = _columns(total)
    values = {name: _totals([block for block in blocks if block.part == name], len(entries)) for name in names}
    return {
        "title": f"step {marks['step']}" if marks["step"] is not None else "",
        "rank": marks["rank"],
        "name": marks.get("name", f"device {device}"),
        "n_events": len(entries),
        "columns": columns,
        "total": [total[event] for event in columns],
        "reserved": [reserved[event] for event in columns],
        "parts": {name: [sizes[event] for event in columns] for name, sizes in values.items()},
        "phases": phases,
        "peak": {"at": peak, "bytes": total[peak], "phase": _phase_at(phases, peak)},
        "top": _top(at_peak, is_marked=is_marked),
    }


def _event_at(entries: Sequence[Mapping[str, Any]], time: int) -> int:
    """Return the index of the first history entry at or after a time in microseconds."""
    return next((at for at, entry in enumerate(entries) if entry.get("time_us", 0) >= time), len(entries))


def _blocks_of(
    snapshot: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    device: int,
    owned: Sequence[tuple[int, Mapping[str, Mapping[int, str]]]],
) -> list[BlockLife]:
    """Return all blocks of a device, named after `owned`: (entry index, {category: {address: tensor name}})."""
    live = {
        address: _block(0, block.n_bytes, block.source)
        for address, block in live_at_start(snapshot, entries, device).items()
    }
    blocks = list(live.values())
    for at, entry in enumerate([*entries, {"action": "end"}]):
        for owners in (owners for moment, owners in owned if moment == at):
            for part, tensors in owners.items():
                for address, name in tensors.items():
                    if address in live and not live[address].part:
                        live[address].part, live[address].name = part if part in PARTS else "other", name
        if entry["action"] == "alloc":
            live[entry["addr"]] = _block(at + 1, entry["size"], entry)
            blocks.append(live[entry["addr"]])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            live.pop(entry["addr"]).died = at + 1
    return blocks


def _block(born: int, n_bytes: int, source: Mapping[str, Any]) -> BlockLife:
    stack = tuple(_frame(frame) for frame in (source.get("frames") or [])[:_MOST_FRAMES])
    label = source.get("user_metadata")
    rounded = -(-n_bytes // _GRANULE) * _GRANULE
    return BlockLife(born, None, rounded, stack, label if isinstance(label, str) else "")


def _frame(frame: Mapping[str, Any]) -> str:
    name = str(frame.get("name"))
    return f"{frame['filename']}:{frame.get('line')} {name}" if frame.get("filename") else name


def _part_of(block: BlockLife, phases: Sequence[tuple[int, str]]) -> str:
    """Guess the category of a block from the phase that allocated it; "other" for blocks that predate the history."""
    return _BORN_IN.get(_phase_at(phases, block.born - 1), "other")


def _line_of(block: BlockLife) -> str:
    """Return the innermost Python frame outside of torch that allocated a block; without one, the innermost frame."""
    own = (frame for frame in block.stack if ".py:" in frame and "/torch/" not in frame)
    return next(chain(own, block.stack, ["(not known)"])).rpartition("site-packages/")[2]


def _module_of(block: BlockLife) -> str:
    phase, _, module = block.label.partition(" | ")
    # A VirtualDevice's only frame is the module.
    return module or (f"({phase})" if phase else _line_of(block))


def _phase_at(phases: Sequence[tuple[int, str]], event: int) -> str:
    return next((name for begin, name in reversed(phases) if begin <= event), "")


def _totals(blocks: Iterable[BlockLife], n_events: int) -> list[int]:
    """Return the bytes that blocks use, before the first event and after each event."""
    changes = [0] * (n_events + 1)
    for block in blocks:
        changes[block.born] += block.size
        if block.died is not None:
            changes[block.died] -= block.size
    return list(accumulate(changes))


def _reserved(snapshot: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], device: int) -> list[int]:
    at_end = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    changes = (-_RESERVES.get(entry["action"], 0) * entry["size"] for entry in reversed(entries))
    return list(accumulate(changes, initial=at_end))[::-1]


def _columns(total: Sequence[int]) -> list[int]:
    """Divide events among chart columns. Return the event in each column after which the most memory is in use."""
    n_columns = min(_COLUMNS, len(total))
    bounds = [column * len(total) // n_columns for column in range(n_columns + 1)]
    return [max(range(low, high), key=total.__getitem__) for low, high in pairwise(bounds)]


def _top(at_peak: Sequence[BlockLife], *, is_marked: bool) -> list[dict[str, Any]]:
    """Return the modules, named tensors or lines of code that hold the most memory at the peak, largest first.

    Entries of one category with equal bytes are merged, such as those of a transformer's blocks. The last entry is the
    sum of the rest, if there is any. `is_marked` tells whether the snapshot names the tensors in blocks.
    """

    def holder(block: BlockLife) -> tuple[str, str]:
        if not is_marked:
            return "", block.label or _line_of(block)
        return block.part, block.name or (_module_of(block) if block.part in _BY_MODULE else "(no name)")

    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for block in at_peak:
        sizes[holder(block)] += block.size
    ties: dict[tuple[str, int], list[str]] = defaultdict(list)
    for (part, name), n_bytes in sorted(sizes.items()):
        ties[part, n_bytes].append(name)
    ranked = sorted(ties.items(), key=lambda item: -item[0][1] * len(item[1]))
    rest = sum(n_bytes * len(names) for (_, n_bytes), names in ranked[_MOST_TOP:])
    shown = [*ranked[:_MOST_TOP], (("", rest), [_REST])] if rest else ranked
    return [{"part": part, "names": names, "bytes": n_bytes} for (part, n_bytes), names in shown]


def step_view(run_directory: Path) -> dict[str, Any]:
    """Return the timeline of a run's last memory snapshot, or the reason why it cannot be shown; {} without one.

    Args:
        run_directory: The directory of the run's event files.
    """
    files = (run_directory / "memtools").glob("memory_snapshot_step*.pickle")
    matches = [(-int(match[1]), int(match[2]), file) for file in files if (match := _NAME.fullmatch(file.name))]
    if not matches:
        return {}
    *_, file = min(matches)
    status = file.stat()
    if status.st_size > _MOST_BYTES:
        return {"problem": f"{file.name} is too large to be shown here: memtools snapshot {file.name} shows it."}
    try:
        return {"timeline": _cached_timeline(file, status.st_mtime_ns)}
    except NotASnapshotError as error:
        return {"problem": str(error)}


@lru_cache(maxsize=8)
def _cached_timeline(path: Path, _changed: int) -> dict[str, Any]:
    return timeline_from(path)
