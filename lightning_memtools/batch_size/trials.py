"""What one trial of one batch size told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank's device showed during a trial. Sizes in bytes; None where the device cannot tell.

    Attributes:
        peak: The most that was taken of the device: reserved by this process, and held by everybody else.
        limit: The most that may be taken: the capacity less the margin.
        peak_allocated: The most that tensors held.
        batch_allocated: The most that tensors held until the backward pass ended: the part that depends on the batch.
            Optimizers that make temporary copies have a peak of their own, which does not.
        base_allocated: Held before a batch was worked on, in the second step: weights, gradients, optimizer state.
        failure: Why this rank could not run the size; empty where it could.
    """

    peak: int | None = None
    limit: int | None = None
    peak_allocated: int | None = None
    batch_allocated: int | None = None
    base_allocated: int | None = None
    failure: str = ""

    @property
    def fits(self) -> bool:
        """Whether it ran to its end, within the limit."""
        return not self.failure and (self.peak is None or self.limit is None or self.peak <= self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch size, run on every rank.

    Attributes:
        stage: train, val, test or predict.
        size: Samples per batch and rank.
        readings: One per rank.
        seconds: How long it took.
        accumulate: Micro-batches per optimizer step that go with this size.
    """

    stage: str
    size: int
    readings: Sequence[Reading]
    seconds: float = 0.0
    accumulate: int = 1

    @property
    def fits(self) -> bool:
        """Whether every rank could run it within its limit."""
        return all(reading.fits for reading in self.readings)

    @property
    def tightest(self) -> Reading:
        """The rank that failed first, or has least left."""
        return min(self.readings, key=lambda r: (not r.failure, (r.limit or 0) - (r.peak or 0)))

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.fits:
            return "fits"
        reading = self.tightest
        what = reading.failure or "over the limit"
        rank = f" (rank {list(self.readings).index(reading)})" if len(self.readings) > 1 else ""
        return what + rank
