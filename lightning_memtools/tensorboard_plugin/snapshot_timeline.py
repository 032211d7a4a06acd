"""A memory snapshot as a timeline: what the memory consists of after every event, the peak, and each block's stack."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError, live_at_start, read_snapshot

_NAME = re.compile(r"memory_snapshot_step(\d+)_rank(\d+)\.pickle")
# Such a file takes a server minutes and gigabytes.
_MOST_BYTES = 1 << 28
PARTS = ("parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "other")
_COLUMNS = 800
_MOST_GROUPS = 7
_MOST_TOP = 10
_MOST_FRAMES = 24
_GRANULE = 512
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_BORN_IN = {"forward": "activations", "backward": "temporaries", "optimizer": "temporaries"}
_REST = "everything else"
_LIBRARIES = ("/torch/", "/lightning/", "/pytorch_lightning/", "/lightning_memtools/", "/contextlib.py")


@dataclass(slots=True)
class BlockLife:
    """A block from its allocation to its end.

    Attributes:
        born: The event that allocated it; 0 for a block that is older.
        died: The event that freed it; None for a block that was in use at the end.
        size: Its bytes.
        address: Its address.
        stack: The frames that allocated it, innermost first; empty where they are not known.
        label: The phase and module that it is labelled with; empty where it is not.
        part: What it is, by category, or by who allocated it where categories are not known.
        name: The name of its tensor, such as "net.1.weight"; empty where it is not known.
    """

    born: int
    died: int | None
    size: int
    address: int
    stack: tuple[str, ...]
    label: str
    part: str = ""
    name: str = ""


def timeline_from(path: Path, *, with_blocks: bool = False) -> dict[str, Any]:
    """Return the timeline of a snapshot in a file, as `timeline_of` does.

    Raises:
        NotASnapshotError: The file is no snapshot.
    """
    return checked_timeline(read_snapshot(path), path, with_blocks=with_blocks)


def checked_timeline(snapshot: Mapping[str, Any], path: Path, *, with_blocks: bool = False) -> dict[str, Any]:
    """Return the timeline of a snapshot that was read from a path.

    Raises:
        NotASnapshotError: Its entries make no sense.
    """
    try:
        return timeline_of(snapshot, with_blocks=with_blocks)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotASnapshotError(f"{path} is no memory snapshot: its entries make no sense ({error}).") from error


def timeline_of(snapshot: Mapping[str, Any], *, with_blocks: bool = False) -> dict[str, Any]:
    """Return a snapshot's timeline as plain values for JSON.

    An event is an allocation or a freeing. A snapshot that MemoryMonitor took shows its step only, divided into
    categories; any other shows all of its history, divided by the lines of the program that allocated most.

    Args:
        snapshot: As `read_snapshot` returns it.
        with_blocks: Also return every block with its stack.
    """
    marks = _marks_of(snapshot)
    device = marks["device"]
    entries: Sequence[Mapping[str, Any]] = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    phases = [(_event_at(entries, time), str(name)) for time, name in marks["phases"]]
    owned = [(_event_at(entries, time), addresses) for time, addresses in marks["owned"]]
    blocks = _blocks_of(snapshot, entries, device, owned)
    first = phases[0][0] if phases else 0
    _divide(blocks, phases, first, is_marked=bool(owned))
    total, reserved = _totals(blocks, len(entries)), _reserved(snapshot, entries, device)
    shown = range(first, len(entries) + 1)
    peak = max(shown, key=total.__getitem__)
    names = _names(blocks, peak)
    kept = [block for block in blocks if block.died is None or block.died > first]
    top = _top(kept, peak, total[peak], is_marked=bool(owned))
    holders = _holders_at(blocks, peak, is_marked=bool(owned))
    for block in blocks:
        block.part = block.part if block.part in names else _REST
    columns = _columns(shown, total)
    return {
        "title": f"step {marks['step']}" if marks["step"] is not None else "",
        "rank": marks["rank"],
        "device": device,
        "name": marks["name"],
        "first": first,
        "n_events": len(shown) - 1,
        "columns": [event - first for event in columns],
        "total": [total[event] for event in columns],
        "reserved": [reserved[event] for event in columns],
        "parts": {name: _values(kept, name, len(entries), columns) for name in names},
        "phases": [[event - first, name] for event, name in phases],
        "peak": {"at": peak - first, "bytes": total[peak], "phase": _phase_at(phases, peak)},
        "top": top,
        "holders_at_peak": holders,
        # A VirtualDevice's only frame is a module, which has no line.
        "holders": "modules" if owned or not any(":" in name for one in top for name in one["names"]) else "lines",
        **(_block_table(kept, first) if with_blocks else {}),
    }


def _marks_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    marks = snapshot.get("memtools")
    if isinstance(marks, dict) and {"phases", "owned", "device", "step", "rank", "name"} <= set(marks):
        return marks
    # The first device that did anything.
    traces = snapshot["device_traces"]
    device = next((index for index, trace in enumerate(traces) if trace), 0)
    return {"phases": [], "owned": [], "device": device, "step": None, "rank": None, "name": f"device {device}"}


def _event_at(entries: Sequence[Mapping[str, Any]], time: int) -> int:
    """Return the number of events before a time."""
    return next((at for at, entry in enumerate(entries) if entry.get("time_us", 0) >= time), len(entries))


def _blocks_of(
    snapshot: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    device: int,
    owned: Sequence[tuple[int, Mapping[str, Mapping[int, str] | Sequence[int]]]],
) -> list[BlockLife]:
    """Return all blocks; those that have an owner at one of the moments of `owned` know their part."""
    live = {
        address: BlockLife(0, None, _rounded(block.n_bytes), address, _stack(block.source), _label(block.source))
        for address, block in live_at_start(snapshot, entries, device).items()
    }
    blocks = list(live.values())
    moments = iter([*owned, (len(entries) + 1, {})])
    moment, owners = next(moments)
    for at, entry in enumerate([*entries, {"action": "end"}]):
        while moment == at:
            for name, addresses in owners.items():
                tensors = addresses if isinstance(addresses, dict) else {}  # snapshots of older versions have no names
                for address in addresses:
                    if address in live and not live[address].part:
                        live[address].part = name if name in PARTS else "other"
                        live[address].name = tensors.get(address, "")
            moment, owners = next(moments)
        if entry["action"] == "alloc":
            address = entry["addr"]
            live[address] = BlockLife(at + 1, None, _rounded(entry["size"]), address, _stack(entry), _label(entry))
            blocks.append(live[address])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            live.pop(entry["addr"]).died = at + 1
    return blocks


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // _GRANULE) * _GRANULE


def _stack(source: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_frame(frame) for frame in (source.get("frames") or [])[:_MOST_FRAMES])


def _frame(frame: Mapping[str, Any]) -> str:
    name = str(frame.get("name"))
    return f"{frame['filename']}:{frame.get('line')} {name}" if frame.get("filename") else name


def _label(source: Mapping[str, Any]) -> str:
    label = source.get("user_metadata")
    return label if isinstance(label, str) else ""


def _divide(blocks: Sequence[BlockLife], phases: Sequence[tuple[int, str]], first: int, *, is_marked: bool) -> None:
    """Give each block that has no part yet one: by the phase in which it was made, or by the line that asked for it."""
    for block in blocks:
        if block.part:
            continue
        if not is_marked:
            block.part = block.label or _line_of(block)
        elif block.born <= first:
            block.part = "other"
        else:
            block.part = _BORN_IN.get(_phase_at(phases, block.born - 1), "other")


def _line_of(block: BlockLife) -> str:
    """Return the innermost frame that is not torch's own."""
    own = (frame for frame in block.stack if "/torch/" not in frame and not frame.startswith("<"))
    return next(own, block.stack[0] if block.stack else "(no stack)")


def _phase_at(phases: Sequence[tuple[int, str]], event: int) -> str:
    return next((name for begin, name in reversed(phases) if begin <= event), "")


def _changes(blocks: Sequence[BlockLife], n_events: int) -> list[int]:
    changes = [0] * (n_events + 2)
    for block in blocks:
        changes[block.born] += block.size
        changes[n_events + 1 if block.died is None else block.died] -= block.size
    return changes


def _totals(blocks: Sequence[BlockLife], n_events: int) -> list[int]:
    total, found = 0, []
    for change in _changes(blocks, n_events)[: n_events + 1]:
        total += change
        found.append(total)
    return found


def _reserved(snapshot: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], device: int) -> list[int]:
    now = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    found = [now]
    for entry in reversed(entries):
        now -= _RESERVES.get(entry["action"], 0) * entry["size"]
        found.append(now)
    return found[::-1]


def _names(blocks: Sequence[BlockLife], peak: int) -> list[str]:
    """Return the parts to show: the categories, or the largest of others and one for the rest."""
    at_peak: dict[str, int] = defaultdict(int)
    for block in blocks:
        at_peak[block.part] += block.size * _is_alive(block, peak)
    if set(at_peak) <= set(PARTS):
        return [name for name in PARTS if name in at_peak]
    largest = sorted(at_peak, key=lambda name: -at_peak[name])[:_MOST_GROUPS]
    return [*largest, _REST] if len(at_peak) > len(largest) else largest


def _is_alive(block: BlockLife, event: int) -> bool:
    return block.born <= event and (block.died is None or block.died > event)


def _columns(shown: range, total: Sequence[int]) -> list[int]:
    """Return the event of each column: of those that share one, that with most memory, so that no peak is lost."""
    n_columns = min(_COLUMNS, len(shown))
    bounds = [shown.start + column * len(shown) // n_columns for column in range(n_columns + 1)]
    return [max(range(low, high), key=total.__getitem__) for low, high in pairwise(bounds)]


def _values(blocks: Sequence[BlockLife], part: str, n_events: int, columns: Sequence[int]) -> list[int]:
    totals = _totals([block for block in blocks if block.part == part], n_events)
    return [totals[event] for event in columns]


def _top(blocks: Sequence[BlockLife], peak: int, total: int, *, is_marked: bool) -> list[dict[str, Any]]:
    """Return who holds the peak, largest share first, the rest last; together they are the total.

    Holders are modules, tensors with a name, or lines of the program. Those of one part that hold equally much come
    together.
    """
    held: dict[tuple[str, str], int] = defaultdict(int)
    for block in blocks:
        if _is_alive(block, peak):
            held[(block.part, _holder_of(block)) if is_marked else ("", block.part)] += block.size
    ties: dict[tuple[str, int], list[str]] = defaultdict(list)
    for (part, name), size in sorted(held.items()):
        ties[part, size].append(name)
    ranked = sorted(ties.items(), key=lambda one: -one[0][1] * len(one[1]))[:_MOST_TOP]
    top = [{"part": part, "bytes": size, "names": names} for (part, size), names in ranked]
    rest = total - sum(size * len(names) for (_, size), names in ranked)
    return [*top, {"part": "", "bytes": rest, "names": [_REST]}] if rest else top


def _holder_of(block: BlockLife) -> str:
    return block.name or (_module_of(block) if block.part in {"activations", "temporaries"} else "(no name)")


def _holders_at(blocks: Sequence[BlockLife], peak: int, *, is_marked: bool) -> dict[str, dict[str, int]]:
    """Return the bytes at the peak by part, by module, and by line of the program; largest first."""
    found: dict[str, dict[str, int]] = {"parts": {}, "modules": {}, "lines": {}}
    for block in blocks:
        if _is_alive(block, peak):
            own = not is_marked or block.part in {"activations", "temporaries"}
            names = (
                ("parts", block.part if is_marked else ""),
                ("modules", _module_of(block) if own else f"({block.part})"),
                ("lines", _program_line(block)),
            )
            for what, name in names:
                if name:
                    found[what][name] = found[what].get(name, 0) + block.size
    return {what: dict(sorted(sizes.items(), key=lambda one: (-one[1], one[0]))) for what, sizes in found.items()}


def _program_line(block: BlockLife) -> str:
    """Return the innermost line that is neither torch's nor Lightning's; "" for blocks without lines."""
    own = (frame for frame in block.stack if ":" in frame and not any(one in frame for one in _LIBRARIES))
    return next(own, "").rpartition("site-packages/")[2]


def _module_of(block: BlockLife) -> str:
    phase, _, module = block.label.partition(" | ")
    # A VirtualDevice's only frame is the module.
    return module or (f"({phase})" if phase else "") or (block.stack[0] if block.stack else "(not known)")


def _block_table(blocks: Sequence[BlockLife], first: int) -> dict[str, Any]:
    """Return every block as columns; stacks and labels, which repeat, by their index."""
    stacks: dict[tuple[str, ...], int] = {}
    labels: dict[str, int] = {}

    def rows() -> Iterator[list[Any]]:
        for block in sorted(blocks, key=lambda block: (block.born, block.address)):
            died = None if block.died is None else block.died - first
            yield [
                max(block.born - first, 0), died, block.size, f"{block.address:#x}", block.part,
                labels.setdefault(block.label, len(labels)), stacks.setdefault(block.stack, len(stacks)), block.name,
            ]  # fmt: skip

    return {"blocks": list(rows()), "labels": list(labels), "stacks": [list(stack) for stack in stacks]}


def step_view(run_directory: Path, name: str | None = None) -> dict[str, Any]:
    """Return the names of a run's snapshots, by step and rank, and the timeline of one of them.

    Args:
        run_directory: The directory of the run's event files.
        name: The one to show; None, or a name that is not among them, for the last step's first rank.
    """
    found = {path.name: path for path in (run_directory / "memtools").glob("memory_snapshot_step*.pickle")}
    ranked = sorted((-int(match[1]), int(match[2]), match[0]) for one in found if (match := _NAME.fullmatch(one)))
    names = [one for *_, one in ranked]
    if not names:
        return {"names": []}
    shown = name if name in names else names[0]
    path = found[shown]
    size = path.stat()
    if size.st_size > _MOST_BYTES:
        problem = f"{shown} is too large to be shown here: memtools snapshot {shown} shows it."
        return {"names": names, "shown": shown, "problem": problem}
    try:
        return {"names": names, "shown": shown, "timeline": _timeline(path, size.st_mtime_ns)}
    except NotASnapshotError as error:
        return {"names": names, "shown": shown, "problem": str(error)}


@lru_cache(maxsize=8)
def _timeline(path: Path, _changed: int) -> dict[str, Any]:
    return timeline_from(path)
