"""Lets the other ranks know which one ran out of memory: all they see is a connection that was closed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import distributed


@dataclass(frozen=True, slots=True)
class Notice:
    """What the rank that ran out of memory first has left.

    Attributes:
        rank: Which one it is.
        headline: What failed where.
        report: Where its report is; "" where there is none.
    """

    rank: int
    headline: str
    report: str = ""


class NoticeBoard:
    """One notice for a call of the Trainer: a file beside the reports, and an entry in the process group's store.

    The file is for ranks on one machine or with a shared file system, and outlives the process that holds the store.

    Args:
        directory: Where reports go; the system's temporary directory in its place where that cannot be written to.
        token: What tells this call from others; the same on every rank.
    """

    def __init__(self, directory: Path | None, token: str) -> None:
        name = f".oom-{token}.json"
        self._key = f"lightning_memtools/oom/{token}"
        places = [] if directory is None else [directory / name]
        self._places = [*places, Path(tempfile.gettempdir()) / name]

    def leave(self, notice: Notice) -> bool:
        """Leave a notice; whether this rank is the first to do so."""
        for path in self._places:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError:  # among them FileExistsError, where a file has the directory's name
                continue
            try:
                with path.open("x", encoding="utf-8") as file:
                    json.dump(asdict(notice), file)
            except FileExistsError:
                return False
            except OSError:
                continue
            break
        _with_store(lambda store: store.set(self._key, json.dumps(asdict(notice))))
        return True

    def replace(self, notice: Notice) -> None:
        """Put a notice in the place of that which this rank left before."""
        text = json.dumps(asdict(notice))
        for path in self._places:
            try:
                if path.exists():
                    path.write_text(text, encoding="utf-8")
                    break
            except OSError:
                continue
        _with_store(lambda store: store.set(self._key, text))

    def read(self) -> Notice | None:
        """The notice, if a rank has left one."""
        for path in self._places:
            try:
                return Notice(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
        text = _with_store(lambda store: store.get(self._key) if store.check([self._key]) else None)
        try:
            return None if text is None else Notice(**json.loads(text))
        except (ValueError, TypeError):
            return None


def _with_store(use: Callable[[Any], Any]) -> Any:
    """What comes of using the store; None where there is none, or where the process that held it is gone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        return use(distributed.distributed_c10d._get_default_store())  # noqa: SLF001, the store has no public access
    except Exception:  # noqa: BLE001, the rank that holds it may be the one that died
        return None
