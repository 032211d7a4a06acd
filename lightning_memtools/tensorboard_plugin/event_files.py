"""Reads the points and texts of this library from TensorBoard's event files, all of them and not a sample.

TensorBoard itself keeps 1,000 random points of each curve, and so loses a peak that lasts one step.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIXES = ("memory/", "loss/", "grad/", "time/", "device/", "nonfinite/", "spikes/", "memtools/")
"""The prefixes of this library's tags."""

_PREFIX_BYTES = tuple(prefix.encode() for prefix in PREFIXES)
_HEADER = struct.Struct("<QI")
# A record is its length (8 bytes), a checksum of the length (4), the event, and a checksum of the event (4).
_FOOTER_BYTES = 4
_CHUNK_BYTES = 1 << 24
_PEEK_BYTES = 1 << 20
_PEEK_FILES = 20
# TensorBoard puts this behind the tag of a text.
_TEXT_SUFFIX = "/text_summary"
# An event with a wall time (field 1), a step (2) and a summary (5) of a single value with a tag (1) and a number (2).
# Steps of ten bytes are negative and left to protobuf, and so are tags of more than 127 bytes.
_POINT = re.compile(
    rb"\x09(.{8})(?:\x10([\x80-\xff]{0,8}[\x00-\x7f]))?\x2a[\x00-\x7f]\x0a[\x00-\x7f]\x0a[\x00-\x7f]"
    rb"([A-Za-z0-9_./ -]+)\x15(.{4})",
    re.DOTALL,
)
_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")


@dataclass(slots=True)
class Curve:
    """The points of one tag in one run, by step.

    Attributes:
        steps: The step of each point; never falls.
        times: The wall-clock time of each point, in seconds since 1970.
        values: The value of each point.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point. Points at later steps were written by a run that was restarted from before, and are dropped."""
        if self.steps and step < self.steps[-1]:
            keep = bisect_left(self.steps, step)
            del self.steps[keep:], self.times[keep:], self.values[keep:]
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class LoggedText:
    """A report in the logs.

    Attributes:
        tag: Its tag, such as "memtools/memory_summary".
        step: The step at which it was logged.
        time: When it was logged, in seconds since 1970.
        text: Markdown.
    """

    tag: str
    step: int
    time: float
    text: str


@dataclass(slots=True)
class LoggedRun:
    """The curves and reports of this library in one run.

    Attributes:
        name: The run's name: the path of its directory below the log directory.
        curves: Tag to curve.
        texts: The reports, in the order in which they were logged.
        notes: Sentences about what could not be read.
    """

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)
    texts: list[LoggedText] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _curve_of: dict[bytes, Curve | None] = field(default_factory=dict, repr=False)

    def add_point(self, record: bytes) -> bool:
        """Add the point of an event that holds a single number, without protobuf; return False for any other event.

        Nearly all events are like this, and read so they take a fifth of the time.
        """
        match = _POINT.fullmatch(record)
        if match is None:
            return False
        time, step, tag, value = match.groups()
        if tag not in self._curve_of:
            name = _without_logger_prefix(tag.decode(errors="replace"))
            ours = name is not None and not name.startswith("memtools/")
            self._curve_of[tag] = self.curves.setdefault(name, Curve()) if ours and name else None
        curve = self._curve_of[tag]
        if curve is not None:
            number = 0
            for byte in reversed(step or b""):  # seven bits in each byte, the lowest first
                number = number << 7 | byte & 0x7F
            curve.add(number, _DOUBLE.unpack(time)[0], _FLOAT.unpack(value)[0])
        return True

    def add_event(self, event: Any) -> None:
        """Add the points and texts of one event."""
        for value in event.summary.value:
            tag = _without_logger_prefix(value.tag)
            if tag is None:
                continue
            if tag.startswith("memtools/"):
                for text in value.tensor.string_val:
                    name = tag.removesuffix(_TEXT_SUFFIX)
                    self.texts.append(LoggedText(name, event.step, event.wall_time, text.decode(errors="replace")))
            else:
                number = number_of(value)
                if number is not None:
                    self.curves.setdefault(tag, Curve()).add(event.step, event.wall_time, number)


def number_of(value: Any) -> float | None:
    """Return the number in a summary's value, which TensorBoard writes in one of two ways; None where it has none."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor"):
        tensor = value.tensor
        for numbers in (tensor.float_val, tensor.double_val):
            if len(numbers) == 1:
                return float(numbers[0])
        if len(tensor.tensor_content) == struct.calcsize("f"):
            return float(struct.unpack("<f", tensor.tensor_content)[0])
    return None


class EventFile:
    """Reads one event file; each call goes on where the last one ended.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = ""
        self._offset = 0

    def read_into(self, run: LoggedRun) -> None:
        """Add the events of this library that were written since the last call to a run.

        A record that is not complete yet is read by a later call. After a damaged record nothing more is read, and
        `broken` says so.
        """
        if self.broken:
            return
        # Imported here: TensorBoard's start should not wait for it.
        from tensorboard.compat.proto import event_pb2  # noqa: PLC0415

        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                rest = b""
                while chunk := file.read(_CHUNK_BYTES):
                    data = rest + chunk
                    used = 0
                    for record, end in self._records(data):
                        used = end
                        if not run.add_point(record) and any(prefix in record for prefix in _PREFIX_BYTES):
                            run.add_event(event_pb2.Event.FromString(record))
                    self._offset += used
                    rest = data[used:]
                    if self.broken:
                        return
        except OSError as error:
            self.broken = f"{self.path.name} cannot be read: {error.strerror}."
        except Exception as error:  # noqa: BLE001, protobuf raises different classes; a damaged file must do no harm
            self.broken = f"{self.path.name} is damaged ({type(error).__name__}): what follows is not shown."

    def starts_with_points(self) -> bool:
        """Return True if this library's points are among the first events. Reads a short piece of the file only."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_PEEK_BYTES)
        except OSError:
            return False
        run = LoggedRun("")
        return any(run.add_point(record) and bool(run.curves) for record, _ in self._records(data))

    def _records(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # noqa: PLC0415, as above

        at, end = 0, len(data)
        while at + _HEADER.size <= end:
            length, checksum = _HEADER.unpack_from(data, at)
            start = at + _HEADER.size
            stop = start + length
            if stop + _FOOTER_BYTES > end:
                # Not written to its end yet, or a damaged length: the checksum tells.
                if masked_crc32c(data[at : at + 8]) != checksum:
                    self.broken = f"{self.path.name} is damaged at byte {self._offset + at:,}: the rest is left out."
                return
            at = stop + _FOOTER_BYTES
            yield data[start:stop], at


class EventDirectory:
    """All runs below a log directory, read as they grow. Safe to use from several threads.

    Args:
        log_dir: The directory that TensorBoard was given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._lock = threading.Lock()
        self._files: dict[Path, EventFile] = {}
        self._runs: dict[str, LoggedRun] = {}

    def refresh(self) -> None:
        """Read what was written since the last call."""
        with self._lock:
            for path in sorted(_event_files(self.log_dir)):
                file = self._files.setdefault(path, EventFile(path))
                name = path.parent.relative_to(self.log_dir).as_posix()
                run = self._runs.setdefault(name, LoggedRun(name))
                was_broken = file.broken
                file.read_into(run)
                if file.broken and not was_broken:
                    run.notes.append(file.broken)

    def starts_with_points(self) -> bool:
        """Return True if one of the newest event files begins with points of this library; takes milliseconds."""
        newest = sorted(_event_files(self.log_dir), key=_changed, reverse=True)[:_PEEK_FILES]
        return any(EventFile(path).starts_with_points() for path in newest)

    @property
    def has_runs(self) -> bool:
        """True once something of this library was found; does not wait for a thread that is reading."""
        return any(run.curves or run.texts for run in list(self._runs.values()))

    def runs(self) -> dict[str, LoggedRun]:
        """Return the runs that have something of this library, by name."""
        with self._lock:
            return {name: run for name, run in sorted(self._runs.items()) if run.curves or run.texts}


def _event_files(directory: Path) -> Iterator[Path]:
    # As TensorBoard does, follow links to directories; `seen` ends a loop of links.
    seen: set[str] = set()
    for folder, folders, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        paths = (Path(folder, name) for name in names if "tfevents" in name)
        yield from (path for path in paths if path.is_file())  # to open a pipe would wait for a writer


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was removed
        return 0.0


def _without_logger_prefix(tag: str) -> str | None:
    """Return a tag without the prefix of a Lightning logger ("prefix-memory/..."); None if not of this library."""
    if tag.startswith(PREFIXES):
        return tag
    _, hyphen, rest = tag.partition("-")
    return rest if hyphen and rest.startswith(PREFIXES) else None
