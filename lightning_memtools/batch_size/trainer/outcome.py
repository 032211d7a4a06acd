"""How a trial ended on each rank, and how the ranks tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memtools.batch_size.trials import Reading
from lightning_memtools.reporting.ranks import RankGather

Failure = Literal[
    "",
    "out of memory",
    "allocation retry",
    "a data-loader worker was killed",
    "the data gave no batch",
    "over the limit",
    "an error of another kind",
]
# What a rank tells the others of a failure is its place in this list.
_FAILURES: tuple[Failure, ...] = (
    "", "out of memory", "allocation retry", "a data-loader worker was killed", "the data gave no batch",
    "over the limit", "an error of another kind",
)  # fmt: skip
_WHERE = ("", " in training", " in validation")
_FIGURES = ("peak", "limit", "peak_allocated", "batch_allocated", "base_allocated")


@dataclass(slots=True)
class Outcome:
    """How a trial ended on this rank.

    Attributes:
        failure: Why it failed; empty where it did not.
        where: The stage that failed, in words, where it is not the one that is tuned.
        error: What the user's code raised that is not about memory.
    """

    failure: Failure = ""
    where: str = ""
    error: BaseException | None = None

    def agree(self, reading: Reading, gather: RankGather) -> tuple[Reading, ...]:
        """Every rank's reading, on every rank; an error of one of them ends all.

        Raises:
            BaseException: What the user's code raised on this rank.
            RuntimeError: Another rank's code raised something.
        """
        figures = [getattr(reading, name) for name in _FIGURES]
        mine = [float(_FAILURES.index(self.failure)), float(_WHERE.index(self.where)),
                *(-1.0 if one is None else float(one) for one in figures)]  # fmt: skip
        everyone = gather.numbers(mine)
        if self.error is not None:
            raise self.error
        failed = [rank for rank, values in enumerate(everyone) if values[0] == len(_FAILURES) - 1]
        if failed:
            raise RuntimeError(
                f"BatchSizeTuner stopped: rank {failed[0]} raised an error in its training or evaluation step, which "
                "is shown there."
            )
        return tuple(_reading(values) for values in everyone)


def _reading(values: list[float]) -> Reading:
    figures = {name: None if one < 0 else int(one) for name, one in zip(_FIGURES, values[2:], strict=True)}
    return Reading(failure=_FAILURES[int(values[0])] + _WHERE[int(values[1])], **figures)
