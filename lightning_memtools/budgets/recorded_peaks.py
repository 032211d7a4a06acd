"""The file of recorded peaks: JSON, one entry for each test, sorted, so that a change of it can be reviewed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_memtools.budgets.peak_memory import PeakMemory

FORMAT = 1
_ABOUT = "Peaks of memory in bytes, written by pytest --memory-record. Review a change of this file as one of the code."


class RecordedPeaksError(ValueError):
    """The file of recorded peaks cannot be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RecordedPeaks:
    """The recorded peaks.

    Attributes:
        file: Where they are kept.
        peaks: By the names of their tests.
    """

    file: Path
    peaks: Mapping[str, PeakMemory]


def read_recorded(file: Path) -> RecordedPeaks:
    """Return the recorded peaks; none where there is no file.

    Raises:
        RecordedPeaksError: The file is cut off, of a newer format, or no such file.
    """
    if not file.exists():
        return RecordedPeaks(file, {})
    again = "Restore it from version control, or delete it and run pytest --memory-record."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordedPeaksError(f"{file.name} cannot be read, it may be cut off: {error}. {again}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tests"), dict):
        raise RecordedPeaksError(f"{file.name} is no file of recorded peaks: it has no table of tests. {again}")
    if content.get("format") != FORMAT:
        raise RecordedPeaksError(
            f"{file.name} has format {content.get('format')!r}, and this version of lightning_memtools reads format "
            f"{FORMAT}. Install the version that wrote it, or delete it and run pytest --memory-record."
        )
    peaks = {}
    for name, row in content["tests"].items():
        try:
            peaks[name] = PeakMemory.from_json(row)
        except (AttributeError, TypeError, ValueError) as error:
            raise RecordedPeaksError(f"{file.name}, entry {name!r}: {error} {again}") from error
    return RecordedPeaks(file, peaks)


def write_recorded(file: Path, new: Mapping[str, Mapping[str, Any]]) -> None:
    """Add peaks to the file, in place of older ones of the same tests. The file is whole at any moment.

    Args:
        file: The file.
        new: The peaks as `PeakMemory.as_json` gives them, by the names of their tests.

    Raises:
        RecordedPeaksError: There is a file that cannot be read.
    """
    known = {name: peak.as_json() for name, peak in read_recorded(file).peaks.items()}
    content = {"about": _ABOUT, "format": FORMAT, "tests": {**known, **new}}
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    part = file.with_name(f"{file.name}.part")
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(file)
