"""The results of a batch size search and of each of its trials, as data and as a markdown report."""

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
        peak: The peak of the memory that this process's allocator reserved.
        limit: The most that the allocator may reserve: the capacity minus the margin, and minus memory held outside of
            the allocator (by other processes, and by the CUDA context).
        spare: The bytes within the limit that tensors must leave free. Used if the margin is smaller than a segment.
        peak_allocated: The peak of the memory that tensors held.
        batch_allocated: The peak of allocated memory until backward ends. It depends on the batch size, unlike a peak
            that an optimizer causes by temporary copies in its step.
        base_allocated: The bytes allocated before the second batch: weights, gradients and optimizer state.
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
    """The trial of one batch size on every rank.

    Attributes:
        stage: "train" or "val".
        size: The batch size on each rank.
        readings: The memory of each rank during the trial.
        is_configured: True for the size that was set before the search. It fits if it runs to its end, even if it
            leaves less than the margin free.
    """

    stage: str
    size: int
    readings: Sequence[RankReading]
    is_configured: bool = False

    @property
    def ended(self) -> bool:
        """True if the trial ran to its end on every rank, even if it exceeded the memory limit."""
        return not any(reading.failure for reading in self.readings)

    @property
    def fits(self) -> bool:
        """True if every rank stayed within its limit; for the configured size, if every rank ran to the end."""
        return self.ended if self.is_configured else all(reading.fits for reading in self.readings)

    @property
    def is_within_margin(self) -> bool:
        """True if the configured size runs but leaves less than the margin free."""
        return self.fits and not all(reading.fits for reading in self.readings)

    @property
    def tightest(self) -> RankReading:
        """The reading of the first rank that failed; if none failed, of the rank with the least memory left."""
        return min(self.readings, key=lambda r: (not r.failure, (r.limit or 0) - (r.peak or 0)))

    @property
    def outcome(self) -> str:
        """The word "fits", or the reason why the size does not fit, with the rank on which it failed."""
        if self.fits:
            return "fits, with less than the margin left" if self.is_within_margin else "fits"
        reading = self.tightest
        rank = f" (rank {list(self.readings).index(reading)})" if len(self.readings) > 1 else ""
        return (reading.failure or "over the limit") + rank


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeResult:
    """The batch sizes that a search found, and the trials that led to them.

    Attributes:
        sizes: The batch size on each rank, for each stage that was tuned. Each size was run in a trial.
        trials: Every trial, in order.
        peaks: For each stage, the peak of reserved bytes at the size found, on the rank with the least memory left.
        accumulate: Micro-batches per optimizer step.
        seconds: The duration of the search.
        device: A sentence that names the device and says if it is simulated.
        n_ranks: The number of ranks that train together.
        notes: Sentences about what limited the sizes, and about the learning rate.
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
        """Return a line with the sizes found, the trials and seconds of the search, and the effective batch size."""
        sizes = ", ".join(f"{stage} {size}" for stage, size in self.sizes.items())
        text = f"Batch size: {sizes} (in {counted(len(self.trials), 'trial', 'trials')}, {self.seconds:.1f} s)"
        if "train" in self.sizes and (self.accumulate > 1 or self.n_ranks > 1):
            ranks = f" x {self.n_ranks} ranks" if self.n_ranks > 1 else ""
            text += f"; {self.accumulate} micro-batches{ranks} = {self.effective_batch_size} samples per step"
        return f"{text}. {self.device}"

    def markdown(self) -> str:
        """Return the whole report in markdown: the summary, the table of trials, and the notes."""
        return "\n\n".join(["# Batch size", self.summary(), self.table(), *self.notes]) + "\n"

    _repr_html_ = shown_as(markdown)


def explain_that_nothing_fits(stage: str, trials: Sequence[SizeTrial]) -> str:
    """Return the error message for a stage in which no batch size fits: the memory it needs, and what to change."""
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
    """Return the reserved peak as text, such as "over 8 GiB" if the trial ran out of memory and needed more."""
    is_cut_off = reading.failure.startswith(OUT_OF_MEMORY) and reading.peak is not None
    return f"over {format_size(reading.peak)}" if is_cut_off else format_size(reading.peak)
