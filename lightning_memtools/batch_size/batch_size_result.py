"""Results of single trials and of a whole search, for programs and for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as

OUT_OF_MEMORY = "out of memory"
"""The beginning of the failure of a trial that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """The memory of one rank's device during a trial. Sizes in bytes; None if the device does not report them.

    Attributes:
        peak: The most that this process's allocator had reserved.
        limit: The most that it may reserve: the capacity minus the margin, and minus memory held outside of the
            allocator (by other processes, and by the CUDA context).
        spare: The bytes below the limit that tensors have to leave free, for a margin smaller than a segment.
        peak_allocated: The most that tensors held.
        batch_allocated: The most that tensors held until the backward pass ended: the part that depends on the batch.
            An optimizer that makes temporary copies has a peak of its own, which does not.
        base_allocated: Held before the second batch was fetched: weights, gradients and optimizer state.
        failure: Why this rank could not run the size; empty if it could.
    """

    peak: int | None = None
    limit: int | None = None
    spare: int = 0
    peak_allocated: int | None = None
    batch_allocated: int | None = None
    base_allocated: int | None = None
    failure: str = ""

    @property
    def fits(self) -> bool:
        """True if the trial ran to its end within the limit."""
        if self.failure or self.peak is None or self.limit is None:
            return not self.failure
        return max(self.peak, (self.peak_allocated or 0) + self.spare) <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrial:
    """One batch size, run on every rank.

    Attributes:
        stage: train or val.
        size: Samples per batch and rank.
        readings: One for each rank.
        is_configured: True for the size that was set before the search. It fits if it runs to its end, also where it
            leaves less than the margin.
    """

    stage: str
    size: int
    readings: Sequence[RankReading]
    is_configured: bool = False

    @property
    def ended(self) -> bool:
        """True if every rank ran the size to its end, within its limit or not."""
        return not any(reading.failure for reading in self.readings)

    @property
    def fits(self) -> bool:
        """True if every rank ran the size within its limit; for the configured size, if every rank ran it."""
        return self.ended if self.is_configured else all(reading.fits for reading in self.readings)

    @property
    def is_within_margin(self) -> bool:
        """True if the configured size runs but leaves less than the margin free."""
        return self.fits and not all(reading.fits for reading in self.readings)

    @property
    def tightest(self) -> RankReading:
        """The first rank that failed, or the one with the least memory left."""
        return min(self.readings, key=lambda r: (not r.failure, (r.limit or 0) - (r.peak or 0)))

    @property
    def outcome(self) -> str:
        """Return "fits", or the reason why the size does not fit, with the rank."""
        if self.fits:
            return "fits, with less than the margin left" if self.is_within_margin else "fits"
        reading = self.tightest
        rank = f" (rank {list(self.readings).index(reading)})" if len(self.readings) > 1 else ""
        return (reading.failure or "over the limit") + rank


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeResult:
    """The batch sizes that a search found, and its trials.

    Attributes:
        sizes: Samples per batch and rank, for each stage that was tuned. Each of them was run.
        trials: Every trial, in order.
        peaks: For each stage, the peak of reserved memory at the size found, on the tightest rank, in bytes.
        accumulate: Micro-batches per optimizer step.
        seconds: Duration of the search.
        device: A sentence that names the device and says if it is simulated.
        n_ranks: Number of ranks that train together.
        notes: Sentences about limits and the learning rate.
    """

    sizes: Mapping[str, int]
    trials: Sequence[SizeTrial]
    peaks: Mapping[str, int | None]
    accumulate: int
    seconds: float
    device: str = ""
    n_ranks: int = 1
    notes: Sequence[str] = ()

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None if training was not tuned."""
        train = self.sizes.get("train")
        return None if train is None else train * self.accumulate * self.n_ranks

    def table(self) -> str:
        """Return the trials as a markdown table."""
        heads = ("stage", "batch size", "outcome", "peak", "limit")
        rows = [
            (one.stage, str(one.size), one.outcome, _peak_in_words(one.tightest), format_size(one.tightest.limit))
            for one in self.trials
        ]
        return markdown_table(Table(heads, rows, align="lrlrr"))

    def summary(self) -> str:
        """Return the sizes, the cost of the search and the effective batch size in one sentence."""
        sizes = ", ".join(f"{stage} {size}" for stage, size in self.sizes.items())
        text = f"Batch size: {sizes} (in {counted(len(self.trials), 'trial', 'trials')}, {self.seconds:.1f} s)"
        if "train" in self.sizes and (self.accumulate > 1 or self.n_ranks > 1):
            ranks = f" x {self.n_ranks} ranks" if self.n_ranks > 1 else ""
            text += f"; {self.accumulate} micro-batches{ranks} = {self.effective_batch_size} samples per step"
        return f"{text}. {self.device}"

    def markdown(self) -> str:
        """Return the whole report."""
        return "\n\n".join(["# Batch size", self.summary(), self.table(), *self.notes]) + "\n"

    _repr_html_ = shown_as(markdown)


def explain_that_nothing_fits(stage: str, trials: Sequence[SizeTrial]) -> str:
    """Return the error message if not even the smallest size fits: what it needs, and what to change."""
    smallest = min(trials, key=lambda trial: trial.size)
    needs = [trial.tightest.peak for trial in trials if trial.tightest.peak is not None]
    text = f"No batch size fits for {stage}: not even {smallest.size} fits ({smallest.outcome}"
    if needs:
        text += f"; it needs at least {format_size(min(needs))}"
    if smallest.tightest.limit is not None:
        text += f", and {format_size(smallest.tightest.limit)} may be used"
    return (
        f"{text}). The model and the data are unchanged. Next: a smaller model or smaller samples, "
        "GradientCheckpointing, a lower precision, a smaller margin, or a device with more memory."
    )


def _peak_in_words(reading: RankReading) -> str:
    """Return the peak as text; a trial that ran out of memory needed more than it had reserved."""
    is_cut_off = reading.failure.startswith(OUT_OF_MEMORY) and reading.peak is not None
    return f"over {format_size(reading.peak)}" if is_cut_off else format_size(reading.peak)
