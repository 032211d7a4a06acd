"""Lets the other ranks know which one ran out of memory: they only see a closed connection."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OOMNotice:
    """The message of the rank that ran out of memory first.

    Attributes:
        rank: The rank.
        headline: What failed, and where.
        report: The path of its report; "" where there is none.
    """

    rank: int
    headline: str
    report: str = ""


class NoticeBoard:
    """Keeps one notice for a call of the Trainer in a file: it outlives the process that failed.

    Args:
        directory: The directory of the reports; None for the system's temporary one.
        token: Distinguishes this call of the Trainer from others; the same on every rank.
    """

    def __init__(self, directory: Path | None, token: str) -> None:
        self._path = (directory or Path(tempfile.gettempdir())) / f".oom-{token}.json"

    def leave(self, notice: OOMNotice) -> bool:
        """Leave a notice, and return True if this rank is the first to do so."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x", encoding="utf-8") as file:
                json.dump(asdict(notice), file)
        except OSError:  # it is there, or no file can be written
            return not self._path.is_file()
        return True

    def read(self) -> OOMNotice | None:
        """Return the notice; None if no rank has left one, or it is half written."""
        try:
            return OOMNotice(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
