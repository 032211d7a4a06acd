"""The shared memory in which the workers of loaders hand over batches, and the limit of a container."""

from __future__ import annotations

import shutil
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# The limit, the use, and the part of the use that the kernel takes back first, in versions 2 and 1 of cgroups.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Version 1 writes the largest number of pages for no limit.
_NO_LIMIT = 1 << 60


def free_shared_memory() -> int | None:
    """Return the free bytes of /dev/shm; None if it does not exist."""
    sizes = shared_memory_use()
    return None if sizes is None else sizes[1] - sizes[0]


def shared_memory_use() -> tuple[int, int] | None:
    """Return the used bytes and the size of /dev/shm; None if it does not exist."""
    place = Path("/dev/shm")  # noqa: S108, no file is written there
    if not place.is_dir():
        return None
    sizes = shutil.disk_usage(place)
    return sizes.used, sizes.total


def container_use(cgroup: Path | None = None) -> tuple[int, int] | None:
    """Return the memory that a container uses and its limit, in bytes; None if it has no limit.

    Shared memory counts as used; page cache that the kernel can reclaim does not.

    Args:
        cgroup: The directory of the control group; by default, the process's group with the least free memory.
    """
    found = [use for place in ([cgroup] if cgroup else _own_cgroups()) if (use := _use_of(place)) is not None]
    return min(found, key=lambda use: use[1] - use[0], default=None)


def free_in_container(cgroup: Path | None = None) -> int | None:
    """Return the bytes that are free under a container's limit (see `container_use`); None without a limit."""
    use = container_use(cgroup)
    return None if use is None else max(use[1] - use[0], 0)


def _own_cgroups() -> list[Path]:
    """Return the directories of the control groups (cgroups) of this process and of all their parent groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = [_CGROUPS, _CGROUPS / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            place = Path(*_CGROUPS.parts, controllers, path.lstrip("/"))
            found += [one for one in (place, *place.parents) if _CGROUPS in one.parents]
    return list(dict.fromkeys(found))


def _use_of(cgroup: Path) -> tuple[int, int] | None:
    for limit_name, used_name, reclaimable in _FILES:
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in (limit_name, used_name))
        except OSError:
            continue
        if not limit.isdigit() or int(limit) >= _NO_LIMIT:
            return None
        return max(int(used) - (_count_in(cgroup / "memory.stat", reclaimable) or 0), 0), int(limit)
    return None


def _count_in(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
