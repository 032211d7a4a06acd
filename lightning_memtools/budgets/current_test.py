"""The test that pytest is running: its name, the settings of the plugin, and the peaks that it has measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """The settings that pytest was started with.

    Attributes:
        file: The file of recorded peaks.
        root: The root directory of the tests; paths in the file are relative to it.
        records: True to record new peaks instead of comparing with recorded ones.
        tolerance: The fraction by which a peak may exceed the recorded one.
    """

    file: Path
    root: Path = Path()
    records: bool = False
    tolerance: float = 0.01


@dataclass
class CurrentTest:
    """The test that pytest is running: the settings that apply to it and the peaks that it has measured.

    Attributes:
        name: The test's node id.
        settings: The settings that pytest was started with.
        peaks: The peaks that the test has measured, by their names in the file of recorded peaks.
        notes: Sentences for the end of pytest's report.
    """

    name: str
    settings: BudgetSettings
    peaks: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def next_name(self) -> str:
        """Return the name to record the test's next peak under: the test's name, numbered from the second peak on."""
        number = len(self.peaks) + 1
        return self.name if number == 1 else f"{self.name} #{number}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: make this test the one that `current_test` returns."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[CurrentTest | None] = ContextVar("current_test", default=None)


def current_test() -> CurrentTest | None:
    """Return the test that pytest is running; None outside of pytest, or if the plugin is switched off."""
    return _current.get()
