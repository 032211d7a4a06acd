"""The peak of a step or of a run in plain values, which can be compared; and the file of recorded peaks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

_SMALL_SHARE = 0.005
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_PLACE = re.compile(r"(?P<place>(?P<file>.+?):\d+)(?P<rest>: .*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The highest memory of a step or of a run, and who held it. Sizes in bytes.

    Attributes:
        allocated: The most that tensors held at one moment.
        reserved: The most that PyTorch's allocator held of the device.
        engine: Whose figures they are: "simulation", "cuda" for PyTorch's CUDA code, or a word of a file's own.
        torch: The version of torch; empty where it is not known.
        gpu: The GPU that was meant; empty for none.
        peak_at: The moment of the peak, such as "step 2, backward, in encoder.3".
        categories: The bytes of parameters, gradients, activations and so on at the peak.
        modules: The bytes of each module at the peak.
        lines: The bytes that each line of code had asked for, such as "model.py:48: x = self.norm(x)".
        notes: What the reader should know of how it was measured.
    """

    allocated: int
    reserved: int
    engine: str = ""
    torch: str = ""
    gpu: str = ""
    peak_at: str = ""
    categories: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values, without empty ones."""
        return {name: value for name, value in asdict(self).items() if value or isinstance(value, int)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `as_json` made plain.

        Raises:
            ValueError: A value is missing or is not of its kind.
        """
        known = {one.name for one in fields(cls)}
        given = {"allocated": -1, "reserved": -1, **content}
        made = cls(**{name: value for name, value in given.items() if name in known})
        for name in ("allocated", "reserved"):
            size = getattr(made, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"{name} is {content.get(name)!r}: it has to be a number of bytes.")
        for name in ("categories", "modules", "lines"):
            sizes = getattr(made, name)
            if not isinstance(sizes, Mapping) or not all(isinstance(size, int) for size in sizes.values()):
                raise ValueError(f"{name} is no table of bytes.")
        return replace(made, notes=tuple(made.notes))

    def named_from(self, root: Path) -> Self:
        """Return it with its lines named from a folder, and not from the one that the process happens to work in."""
        return replace(self, lines={_named_from(line, root): size for line, size in self.lines.items()})

    def shortened(self) -> Self:
        """Return it for a file that people review: members of lists together, and without small parts."""
        least = _SMALL_SHARE * self.allocated
        large = {name: size for name, size in _summed(self.modules).items() if size >= least}
        lines = {line: size for line, size in self.lines.items() if line and size >= least}
        return replace(self, modules=large, lines=lines, notes=())


def _named_from(line: str, root: Path) -> str:
    match = _PLACE.fullmatch(line)
    path = Path.cwd() / match["file"] if match else None
    if match is None or path is None or not path.is_relative_to(root) or not path.exists():
        return line  # of an installed library, whose name does not depend on the folder
    return f"{path.relative_to(root).as_posix()}{line.removeprefix(match['file'])}"


def pattern_of(module: str) -> str:
    """Return a module's path with its numbers replaced, so that members of a list have the same: "layers.*.norm"."""
    return _NUMBER.sub("*", module)


def without_number(line: str) -> str:
    """Return a line without its number: lines above it may have come or gone."""
    match = _PLACE.fullmatch(line)
    return f"{match['file']}{match['rest']}" if match else line


def place_of(line: str) -> str:
    """Return a line's file and number without its text."""
    match = _PLACE.fullmatch(line)
    return match["place"] if match else line


def _summed(modules: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in modules.items():
        found[pattern_of(name)] = found.get(pattern_of(name), 0) + size
    return found


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
