"""The results of a batch size search and of each of its trials, as data and as a markdown report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as

OUT_OF_MEMORY = "out of memory"
"""The beginning of the failure of a trial that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrial:
    """The trial run of one batch size. With several ranks, the values are those of the rank with the least memory left.

    Amounts of memory are in bytes, or None if the device does not report them.

    Attributes:
        stage: "train" or "val".
        size: The batch size on each rank.
        peak: The peak of the memory that the allocator of this process reserved.
        limit: The most that the allocator may reserve: the device's capacity minus the margin to leave free, and minus
            memory held outside of the allocator (by other processes, and by the CUDA context).
        spare: Bytes within `limit` that tensors must leave free: a margin smaller than an allocator segment, else 0.
        peak_allocated: The peak of the memory that tensors held.
        batch_allocated: The peak of allocated memory in forward and backward. The optimizer's step is left out, because
            its temporary memory does not depend on the batch size.
        base_allocated: The bytes allocated before the second batch: weights, gradients and optimizer state.
        failure: The reason why a rank could not run the size; "" if all ranks could.
        is_configured: True if the user had set this size. The size then counts as fitting if its trial runs to the end,
            even if less memory than the margin is left free.
    """

    stage: str
    size: int
    peak: int | None = None
    limit: int | None = None
    spare: int = 0
    peak_allocated: int | None = None
    batch_allocated: int | None = None
    base_allocated: int | None = None
    failure: str = ""
    is_configured: bool = False

    @property
    def fits(self) -> bool:
        """True if the trial ran to its end and stayed within the limit. The configured size may exceed the limit."""
        return not self.failure and (self.is_configured or self._keeps_margin)

    @property
    def is_within_margin(self) -> bool:
        """True if this configured size was accepted although it leaves less memory free than the margin."""
        return self.fits and not self._keeps_margin

    @property
    def _keeps_margin(self) -> bool:
        if self.peak is None or self.limit is None:
            return True
        return max(self.peak, (self.peak_allocated or 0) + self.spare) <= self.limit

    @property
    def outcome(self) -> str:
        """The word "fits", or the reason why the size does not fit."""
        if self.fits:
            return "fits, with less than the margin left" if self.is_within_margin else "fits"
        return self.failure or "over the limit"


def tightest(trials: Sequence[SizeTrial]) -> SizeTrial:
    """Return the trial of a rank that failed; if no rank failed, the trial with the least memory left."""
    trial = min(trials, key=lambda one: (not one.failure, (one.limit or 0) - (one.peak or 0)))
    if not trial.failure or len(trials) == 1:
        return trial
    return replace(trial, failure=f"{trial.failure} (rank {list(trials).index(trial)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeResult:
    """The batch sizes that a search found, and the trials that led to them.

    Attributes:
        sizes: The batch size on each rank, for each stage that was tuned. Each size was run in a trial.
        trials: Every trial, in order.
        peaks: For each stage, the peak of reserved bytes at the size found.
        accumulate: The number of micro-batches per optimizer step.
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
        """The number of samples per optimizer step over all ranks; None if training was not tuned."""
        train = self.sizes.get("train")
        return None if train is None else train * self.accumulate * self.n_ranks

    def table(self) -> str:
        """Return the trials as a markdown table."""
        heads = ("stage", "batch size", "outcome", "peak", "limit")
        rows = [
            (one.stage, str(one.size), one.outcome, format_size(one.peak), format_size(one.limit))
            for one in self.trials
        ]
        return markdown_table(Table(heads, rows, align="lrlrr"))

    def summary(self) -> str:
        """Return a line with the sizes found, the number of trials, the seconds taken, and the effective batch size."""
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
    """Return an error message for a stage in which no batch size fits. It says what is needed, and what to change."""
    smallest = min(trials, key=lambda trial: trial.size)
    return (
        f"No batch size fits for {stage}: not even {smallest.size} fits ({smallest.outcome}; it needs at least "
        f"{format_size(smallest.peak)}, and {format_size(smallest.limit)} may be used). The model and the data are "
        "unchanged. Next: a smaller model or smaller samples, GradientCheckpointing, a lower precision, a smaller "
        "margin, or a device with more memory."
    )
