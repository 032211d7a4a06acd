"""The host's memory."""

from __future__ import annotations

import psutil


def host_rss_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)
