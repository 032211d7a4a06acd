"""What the tuner found, for a program and for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_memtools.batch_size.trials import Trial
from lightning_memtools.memory.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeResult:
    """The batch sizes that were found, and how.

    Attributes:
        sizes: Samples per batch and rank, for each stage that was tuned. Each was run.
        trials: Every trial, in order.
        peaks: For each stage, the most that was taken of the device at that size (the tightest rank), in bytes.
        accumulate: Micro-batches per optimizer step.
        n_ranks: How many ranks train together.
        seconds: How long the search took.
        device: The device, in words; says so if it is a simulated one.
        notes: What a reader should know besides, in sentences.
    """

    sizes: Mapping[str, int]
    trials: Sequence[Trial]
    peaks: Mapping[str, int | None]
    accumulate: int
    seconds: float
    device: str = ""
    n_ranks: int = 1
    notes: Sequence[str] = field(default=())

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None where training was not tuned."""
        train = self.sizes.get("train")
        return None if train is None else train * self.accumulate * self.n_ranks

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Stage, size, outcome, peak and limit of each trial."""
        return [
            (
                trial.stage,
                str(trial.size),
                trial.outcome,
                _size(trial.tightest.peak),
                _size(trial.tightest.limit),
            )
            for trial in self.trials
        ]

    def table(self) -> str:
        """The trials as a table in markdown."""
        lines = ["| stage | batch size | outcome | peak | limit |", "| --- | ---: | --- | ---: | ---: |"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows()])

    def summary(self) -> str:
        """One sentence."""
        found = ", ".join(f"{stage} {size}" for stage, size in self.sizes.items())
        text = f"Batch size: {found} (in {len(self.trials)} trials, {self.seconds:.1f} s)"
        if "train" in self.sizes and (self.accumulate > 1 or self.n_ranks > 1):
            ranks = f" x {self.n_ranks} ranks" if self.n_ranks > 1 else ""
            text += f"; {self.accumulate} micro-batches{ranks} = {self.effective_batch_size} samples per step"
        return f"{text}. {self.device}"

    def markdown(self) -> str:
        """The whole report."""
        return "\n\n".join(["# Batch size", self.summary(), self.table(), *self.notes]) + "\n"


def nothing_fits(stage: str, trials: Sequence[Trial]) -> str:
    """The error's text when not even the smallest size fits, with the smallest need that was measured."""
    smallest = min(trials, key=lambda trial: trial.size)
    reading = smallest.tightest
    measured = [trial for trial in trials if trial.tightest.peak is not None]
    need = min((trial.tightest.peak or 0 for trial in measured), default=None)
    text = f"No batch size fits for {stage}: already {smallest.size} does not ({smallest.outcome}"
    if need is not None:
        text += f"; at least {format_size(need)} were needed"
    if reading.limit is not None:
        text += f", and {format_size(reading.limit)} may be used"
    return (
        f"{text}). The model and the data are as they were. Next: a smaller model or samples, "
        "GradientCheckpointing, a lower precision, a smaller margin, or a device with more memory."
    )


def _size(n_bytes: int | None) -> str:
    return "not known" if n_bytes is None else format_size(n_bytes)
