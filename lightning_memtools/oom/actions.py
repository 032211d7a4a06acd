"""A suggested change of the failed run, the outcome of trying it, and the ranking of changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ActionKind(IntEnum):
    """The kinds of changes that a report suggests, the least intrusive first."""

    HOLDER = 0
    GROWTH = 1
    RARE_BATCH = 2
    EXPANDABLE_SEGMENTS = 3
    STOP_PROCESS = 4
    LOSS = 5
    CHECKPOINTING = 6
    ACCUMULATION = 7
    BATCH_SIZE = 8
    PRECISION = 9
    LARGER_GPU = 10


class Outcome(IntEnum):
    """The possible results of trying a change, the best first."""

    ENOUGH = 0
    """The step fits."""
    MAY_BE_ENOUGH = 1
    """Memory is freed, and it is not known whether the step then fits."""
    NOT_ENOUGH = 2
    """Memory is freed, but the step does not fit yet."""
    USELESS = 3

    @classmethod
    def of(cls, *, fits: bool | None) -> Outcome:
        """Return the outcome of a change that frees memory. `fits` is None if it is unknown whether the step fits."""
        return {True: cls.ENOUGH, False: cls.NOT_ENOUGH, None: cls.MAY_BE_ENOUGH}[fits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One suggested change.

    Attributes:
        kind: The kind of change.
        title: The change in a few words.
        outcome: The result of trying it.
        detail: The result in sentences, without the last period.
        code: The code or setting that makes the change.
        saved: The number of bytes that the change frees.
        cause: The cause of the failure in a sentence, if the change removes this cause; else "".
        peak: The peak of the changed step in bytes; None if no step was traced.
        price: The extra computation that the change costs, such as "5% more computation"; "" for none.
    """

    kind: ActionKind
    title: str
    outcome: Outcome = Outcome.USELESS
    detail: str = ""
    code: str = ""
    saved: int = 0
    cause: str = ""
    peak: int | None = None
    price: str = ""

    @property
    def helps(self) -> bool:
        """True if the change frees memory, even if not enough."""
        return self.outcome <= Outcome.NOT_ENOUGH

    def __str__(self) -> str:
        return f"{self.title}{f' (`{self.code}`)' if self.code else ''}. {self.detail}."


def ranked(actions: Iterable[Action]) -> list[Action]:
    """Return the suggested changes, the most useful first.

    The order is: changes that remove the cause of the failure; changes that make the step fit (the least intrusive
    first); changes that only free memory (the most bytes first); and useless changes.
    """

    def rank(action: Action) -> tuple[bool, bool, int, int, int]:
        n_bytes = 0 if action.outcome is Outcome.ENOUGH else -action.saved
        return not action.helps, not action.cause, action.outcome, n_bytes, action.kind

    return sorted(actions, key=rank)
