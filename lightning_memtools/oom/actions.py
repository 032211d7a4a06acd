"""What can be done about it: each a line of a report, with numbers only where they were checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What is changed, in the order in which one would try what is enough by itself: the least intrusive first."""

    GROWTH = 0
    EXPANDABLE_SEGMENTS = 1
    EMPTY_CACHE = 2
    STOP_PROCESS = 3
    PREDICTIONS = 4
    CHECKPOINTING = 5
    ACCUMULATION = 6
    BATCH_SIZE = 7
    PRECISION = 8
    OPTIMIZER = 9
    LARGER_GPU = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do.

    Attributes:
        kind: What it changes.
        title: In a few words.
        detail: What was found; for what was not checked, why not.
        checked: Whether the numbers were found by tracing the step, or by replaying the recorded history.
        fits: Whether it is enough by itself; None where that is not known.
        saved: By how many bytes it lowers the peak of a step.
        code: What to write in the program.
    """

    kind: Kind
    title: str
    detail: str = ""
    checked: bool = False
    fits: bool | None = None
    saved: int = 0
    code: str = ""

    @property
    def is_useless(self) -> bool:
        """Whether it was checked and changes nothing."""
        return self.checked and not self.fits and self.saved <= 0

    def __str__(self) -> str:
        code = f" (`{self.code}`)" if self.code else ""
        if not self.checked:
            why = f": {self.detail}" if self.detail else ""
            return f"{self.title}{code}. Not checked{why}."
        return f"{self.title}{code}: {self.detail}."


def ranked(actions: Iterable[Action]) -> list[Action]:
    """What is enough first, by how little it changes; then what helps, by how much; then what was not checked.

    What was checked and does not help comes last.
    """

    def worth(one: Action) -> tuple[bool, bool, bool, int, int]:
        return one.is_useless, not one.checked, not one.fits, 0 if one.fits else -one.saved, one.kind

    return sorted(actions, key=worth)
