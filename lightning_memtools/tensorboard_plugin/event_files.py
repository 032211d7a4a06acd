"""Reads all points and texts of this library from TensorBoard's event files.

TensorBoard itself keeps 1,000 random points of each curve, and so loses a peak that lasts one step.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIXES = ("memory/", "loss/", "time/", "nonfinite/", "spikes/", "memtools/")
"""The prefixes of this library's tags."""

# TensorBoard puts this behind the tag of a text.
_TEXT_SUFFIX = "/text_summary"
# Before each event: its length in bytes, and a checksum of that. Behind it: a checksum of the event.
_HEAD, _CHECKSUM = struct.Struct("<Q4x"), 4


@dataclass(slots=True)
class Curve:
    """The points that one run logged under one tag, in the order of their steps.

    Attributes:
        steps: The step of each point, in ascending order.
        times: The wall-clock time of each point, in seconds since 1970.
        values: The value of each point.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point. If the run has resumed from an earlier step, first drop the points from that step on."""
        if self.steps and step < self.steps[-1]:
            keep = bisect_left(self.steps, step)
            del self.steps[keep:], self.times[keep:], self.values[keep:]
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class LoggedText:
    """A report that was logged as text.

    Attributes:
        tag: The report's tag, such as "memtools/memory_summary".
        step: The step at which it was logged.
        time: The time at which it was logged, in seconds since 1970.
        text: The report as markdown.
    """

    tag: str
    step: int
    time: float
    text: str


@dataclass(slots=True)
class LoggedRun:
    """The curves and reports that this library logged in one run.

    Attributes:
        name: The path of the run's directory, relative to the log directory.
        curves: The curves by tag.
        texts: The reports, in the order in which they were logged.
        notes: Sentences about event files that could not be read.
    """

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)
    texts: list[LoggedText] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, event: Any) -> None:
        """Add what an event (TensorBoard's protobuf) holds of this library: points, or a report."""
        for value in event.summary.value:
            tag = without_logger_prefix(value.tag)
            if tag is None:
                continue
            if value.HasField("simple_value"):
                self.curves.setdefault(tag, Curve()).add(event.step, event.wall_time, value.simple_value)
            elif tag.startswith("memtools/"):
                tag = tag.removesuffix(_TEXT_SUFFIX)
                texts = (text.decode(errors="replace") for text in value.tensor.string_val)
                self.texts += [LoggedText(tag, event.step, event.wall_time, text) for text in texts]


class _EventFile:
    """Reads one event file. TensorBoard's DirectoryWatcher creates it, and calls `Load` again when the file grows.

    TensorBoard's own loader computes checksums in Python, which takes most of the 10 s for 250,000 points.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._read = 0

    def Load(self) -> Iterator[Any]:  # noqa: N802, TensorBoard's name
        """Yield the events that were added since the last call. Stop at a damaged event, or one not fully written."""
        from google.protobuf.message import DecodeError  # noqa: PLC0415, TensorBoard's start should not wait for it
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415, as above

        if not self._path.is_file():
            return  # it was deleted, and the run is repeated in another file
        n_bytes = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(self._read)
            while self._read + _HEAD.size < n_bytes:
                (length,) = _HEAD.unpack(file.read(_HEAD.size))
                end = self._read + _HEAD.size + length + _CHECKSUM
                if end > n_bytes:
                    return
                try:
                    event = Event.FromString(file.read(length + _CHECKSUM)[:-_CHECKSUM])
                except DecodeError:
                    return
                self._read = end
                yield event


class EventDirectory:
    """The event files of all runs below a log directory. Not thread-safe.

    Args:
        log_dir: The directory that TensorBoard was given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._runs: dict[str, tuple[LoggedRun, Any]] = {}

    def read(self) -> dict[str, LoggedRun]:
        """Read the events that were written since the last call.

        Returns:
            The runs in which this library logged curves or reports, by name. The next call adds to them.
        """
        # Imported here: TensorBoard's start should not wait for it.
        from tensorboard.backend.event_processing import directory_watcher, io_wrapper  # noqa: PLC0415

        for folder in io_wrapper.GetLogdirSubdirectories(str(self.log_dir)):
            name = Path(folder).relative_to(self.log_dir).as_posix()
            if name not in self._runs:
                events = directory_watcher.DirectoryWatcher(folder, _EventFile, io_wrapper.IsSummaryEventsFile)
                self._runs[name] = LoggedRun(name), events
            run, events = self._runs[name]
            run.notes.clear()
            try:
                for event in events.Load():
                    run.add(event)
            except Exception as error:  # noqa: BLE001, whatever TensorBoard raises must not hide the other runs
                run.notes.append(f"An event file cannot be read ({type(error).__name__}): what follows is not shown.")
            run.texts.sort(key=lambda text: text.time)
        return {name: run for name, (run, _) in sorted(self._runs.items()) if run.curves or run.texts}


def without_logger_prefix(tag: str) -> str | None:
    """Remove a Lightning logger's prefix from a tag ("prefix-memory/..."); None if this library logs no such tag."""
    if tag.startswith(PREFIXES):
        return tag
    _, hyphen, rest = tag.partition("-")
    return rest if hyphen and rest.startswith(PREFIXES) else None
