"""The memory of the host, and of Python on it."""

from __future__ import annotations

import gc
import sys

import psutil


def host_rss_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def blocks_to_walk() -> int:
    """About how many blocks of memory belong to objects that Python's garbage collector looks at.

    A measure of how long any pass over all objects takes that costs nothing itself. What `gc.freeze` has hidden is not
    looked at; with torch and Lightning imported an object takes some four blocks.
    """
    return max(0, sys.getallocatedblocks() - 4 * gc.get_freeze_count())
