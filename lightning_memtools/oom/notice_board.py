"""Lets the other ranks know which one ran out of memory: they only see a closed connection."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_memtools.reporting.ranks import with_store


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
    """Keeps one notice for a call of the Trainer: in a file beside the reports, and in the process group's store.

    The file is for ranks on one machine or with a shared file system, and outlives the process that holds the store.

    Args:
        directory: The directory of the reports; None for the system's temporary one.
        token: Distinguishes this call of the Trainer from others; the same on every rank.
    """

    def __init__(self, directory: Path | None, token: str) -> None:
        self._path = (directory or Path(tempfile.gettempdir())) / f".oom-{token}.json"
        self._key = f"lightning_memtools/oom/{token}"

    def leave(self, notice: OOMNotice) -> bool:
        """Leave a notice, and return True if this rank is the first to do so."""
        text = json.dumps(asdict(notice))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            if self._path.is_file():
                return False
        except OSError:  # no directory can be made, or the disk is full: the store is left
            pass
        with_store(lambda store: store.set(self._key, text))
        return True

    def read(self) -> OOMNotice | None:
        """Return the notice; None if no rank has left one."""
        try:
            text: str | None = self._path.read_text(encoding="utf-8")
        except OSError:
            text = with_store(lambda store: store.get(self._key) if store.check([self._key]) else None)
        try:
            return None if text is None else OOMNotice(**json.loads(text))
        except (ValueError, TypeError):  # half written
            return None
