"""Lets the other ranks know which one ran out of memory: they only see a closed connection."""

from __future__ import annotations

import tempfile
from pathlib import Path


class NoticeBoard:
    """Keeps one text for a call of the Trainer in a file: it outlives the process that failed.

    Args:
        directory: The directory of the reports; None for the system's temporary one.
        token: Distinguishes this call of the Trainer from others; the same on every rank.
    """

    def __init__(self, directory: Path | None, token: str) -> None:
        self._path = (directory or Path(tempfile.gettempdir())) / f".oom-{token}.txt"

    def leave(self, text: str) -> bool:
        """Leave a text, and return True if this rank is the first to do so."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError:  # it is there, or no file can be written
            return not self._path.is_file()
        return True

    def read(self) -> str:
        """Return the text; "" if no rank has left one."""
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError:
            return ""
