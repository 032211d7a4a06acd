"""The snapshots of single steps that MemoryMonitor has put beside a run's event files."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError
from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from

_NAME = re.compile(r"memory_snapshot_step(\d+)_rank(\d+)\.pickle")
# Such a file takes a server minutes and gigabytes.
_MOST_BYTES = 1 << 28


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
