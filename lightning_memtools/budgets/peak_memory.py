"""The peak of a step or a run as plain values that can be compared, and the file of recorded peaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

_SMALL_SHARE = 0.005
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_LINE = re.compile(r"(?P<file>.+?):\d+(?P<text>: .*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak memory of a step or a run, and what took it. Sizes in bytes.

    Attributes:
        allocated: The peak of the memory that tensors held.
        reserved: The peak of the memory that PyTorch's allocator reserved on the device.
        engine: The source of the peak, such as "simulation", or "cuda" for PyTorch's own CUDA code.
        torch: The version of torch; "" if unknown.
        gpu: The GPU that was measured or simulated; "" for none.
        peak_at: The moment of the peak, such as "step 2, backward, in encoder.3".
        categories: The bytes of parameters, gradients, activations and so on at the peak.
        modules: The bytes of each module at the peak.
        lines: The bytes at the peak that each line of code allocated, such as "model.py:48: x = self.norm(x)".
        notes: Sentences on how the peak was measured.
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
        """Return the peak as a dictionary for JSON, without empty values."""
        return {name: value for name, value in asdict(self).items() if value or isinstance(value, int)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the peak from the dictionary that `as_json` returned.

        Raises:
            TypeError: `allocated` or `reserved` is missing.
        """
        known = {one.name for one in fields(cls)}
        made = cls(**{name: value for name, value in content.items() if name in known})
        return replace(made, notes=tuple(made.notes))

    def recorded_form(self, root: Path) -> Self:
        """Return a short form of the peak to record in a file: without small entries, with paths relative to `root`.

        Modules whose names differ only in a number are summed, under a name such as "layers.*.norm".
        """
        least = _SMALL_SHARE * self.allocated
        modules = {name: size for name, size in by_pattern(self.modules).items() if size >= least}
        lines = {_named_from(line, root): size for line, size in self.lines.items() if line and size >= least}
        return replace(self, modules=modules, lines=lines, notes=())


def _named_from(line: str, root: Path) -> str:
    match = _LINE.fullmatch(line)
    path = Path.cwd() / match["file"] if match else None
    if match is None or path is None or not path.is_relative_to(root) or not path.exists():
        return line  # of an installed library, whose name does not depend on the folder
    return f"{path.relative_to(root).as_posix()}{line.removeprefix(match['file'])}"


def by_pattern(modules: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by module path. Numbers in paths become "*" ("layers.*.norm"), and equal paths are summed."""
    sizes: Counter[str] = Counter()
    for name, size in modules.items():
        sizes[_NUMBER.sub("*", name)] += size
    return dict(sizes)


def without_number(line: str) -> str:
    """Return a line of code without its line number, which changes when lines above it are added or removed."""
    match = _LINE.fullmatch(line)
    return f"{match['file']}{match['text']}" if match else line


FORMAT = 1
_ABOUT = "Peaks of memory in bytes, written by pytest --memory-record. Review a change of this file as one of the code."


def read_recorded(file: Path) -> dict[str, PeakMemory]:
    """Return the recorded peaks by the names of their tests; {} if there is no file.

    Raises:
        ValueError: The file is damaged, or has another format version.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, where this version reads {FORMAT}")  # noqa: TRY301
        return {name: PeakMemory.from_json(row) for name, row in content["tests"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file.name} is no usable file of recorded peaks ({type(error).__name__}: {error}). Restore it from "
            "version control, or delete it and run pytest --memory-record."
        ) from error


def write_recorded(file: Path, new: Mapping[str, Mapping[str, Any]]) -> None:
    """Add `new` peaks (from `PeakMemory.as_json`) to the file. They replace peaks of the same names."""
    known = {name: peak.as_json() for name, peak in read_recorded(file).items()}
    content = {"about": _ABOUT, "format": FORMAT, "tests": {**known, **new}}
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
