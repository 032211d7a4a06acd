"""The shared memory in which the workers of loaders hand over batches."""

from __future__ import annotations

import shutil
from pathlib import Path

# A container's limits, by cgroup version 2.
_CGROUP = Path("/sys/fs/cgroup")


def free_shared_memory() -> int | None:
    """Return the free bytes of /dev/shm; None where it does not exist."""
    place = Path("/dev/shm")  # noqa: S108, no file is written there
    return shutil.disk_usage(place).free if place.is_dir() else None


def free_in_container(cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that a container's memory limit leaves, to which shared memory counts; None without a limit.

    Args:
        cgroup: The directory of the control group.
    """
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdigit() else None
