"""Reads all points and texts of this library, with TensorBoard's own reader but without its sampling.

TensorBoard itself keeps 1,000 random points of each curve, and so loses a peak that lasts one step.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIXES = ("memory/", "loss/", "time/", "nonfinite/", "spikes/", "memtools/")
"""The prefixes of this library's tags."""

# TensorBoard puts this behind the tag of a text.
_TEXT_SUFFIX = "/text_summary"


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


class _RunReader:
    """Reads the event files in a run's directory. `refresh` reads the events that were added since the last call."""

    def __init__(self, directory: Path, name: str) -> None:
        # Imported here: TensorBoard's start should not wait for it.
        from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415

        everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
        self._directory = directory
        self._events = event_accumulator.EventAccumulator(str(directory), size_guidance=everything)
        self._size = -1
        self.run = LoggedRun(name)

    def refresh(self) -> None:
        size = sum(path.stat().st_size for path in self._directory.iterdir() if "tfevents" in path.name)
        if size == self._size:
            return
        self._size = size
        run = LoggedRun(self.run.name)
        try:
            self._events.Reload()
        except Exception as error:  # noqa: BLE001, protobuf raises different classes; a damaged file must do no harm
            run.notes.append(f"An event file cannot be read ({type(error).__name__}): what follows is not shown.")
        tags = self._events.Tags()
        for logged in tags["scalars"]:
            tag = without_logger_prefix(logged)
            if tag is not None:
                curve = run.curves.setdefault(tag, Curve())
                for event in self._events.Scalars(logged):
                    curve.add(event.step, event.wall_time, event.value)
        for logged in tags["tensors"]:
            tag = without_logger_prefix(logged) or ""
            if tag.startswith("memtools/"):
                run.texts += [
                    LoggedText(tag.removesuffix(_TEXT_SUFFIX), event.step, event.wall_time, text)
                    for event in self._events.Tensors(logged)
                    for text in _texts_of(event.tensor_proto)
                ]
        run.texts.sort(key=lambda text: text.time)
        self.run = run


def _texts_of(proto: Any) -> list[str]:
    from tensorboard.util import tensor_util  # noqa: PLC0415, as above

    values = tensor_util.make_ndarray(proto).flatten().tolist()
    return [value.decode(errors="replace") for value in values if isinstance(value, bytes)]


class EventDirectory:
    """Reads the event files of all runs below a log directory. `refresh` reads newly added events. Thread-safe.

    Args:
        log_dir: The directory that TensorBoard was given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._lock = threading.Lock()
        self._readers: dict[str, _RunReader] = {}

    def refresh(self) -> None:
        """Read the events that were written since the last call."""
        from tensorboard.backend.event_processing import io_wrapper  # noqa: PLC0415, as above

        with self._lock:
            for folder in map(Path, io_wrapper.GetLogdirSubdirectories(str(self.log_dir))):
                name = folder.relative_to(self.log_dir).as_posix()
                if name not in self._readers:
                    self._readers[name] = _RunReader(folder, name)
                self._readers[name].refresh()

    def runs(self) -> dict[str, LoggedRun]:
        """Return the runs in which this library logged curves or reports, as a dict by name."""
        with self._lock:
            runs = {name: reader.run for name, reader in sorted(self._readers.items())}
        return {name: run for name, run in runs.items() if run.curves or run.texts}


def without_logger_prefix(tag: str) -> str | None:
    """Remove a Lightning logger's prefix from a tag ("prefix-memory/..."); None if this library logs no such tag."""
    if tag.startswith(PREFIXES):
        return tag
    _, hyphen, rest = tag.partition("-")
    return rest if hyphen and rest.startswith(PREFIXES) else None
