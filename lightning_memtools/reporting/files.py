"""Writes reports as files: `<log_dir>/memtools/<name>`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lightning_memtools.reporting.ranks import RankGather


@dataclass(frozen=True, slots=True)
class NotWritten:
    """The reason why there is no file.

    Attributes:
        reason: What follows "The report ..." in a sentence: "not written: this run keeps no files (fast_dev_run)", or
            "could not be written: [Errno 28] No space left on device".
        is_failure: True where writing was tried and failed, False where the run keeps no files.
    """

    reason: str
    is_failure: bool = False


NO_RUN = NotWritten("not written: no run has begun")


def report_directory(trainer: Trainer, directory: str | None = None) -> Path | NotWritten:
    """Return the directory for this run's reports, or the reason why the run keeps no files.

    Call it on every rank or on none: `Trainer.log_dir` is a broadcast from rank 0.

    Args:
        trainer: Its `log_dir` is the parent of the directory "memtools".
        directory: The callback's own argument, which takes precedence and is used as it is.
    """
    if directory is not None:
        return Path(directory)
    if not trainer.loggers:
        # Trainer.log_dir is the working directory then, and nobody asked for files there.
        return NotWritten("not written: this run keeps no files (logger=False)")
    log_dir = trainer.log_dir
    if log_dir is None or getattr(trainer, "fast_dev_run", False):
        return NotWritten("not written: this run keeps no files (fast_dev_run)")
    return Path(log_dir) / "memtools"


def write_report(directory: Path | NotWritten, name: str, text: str) -> Path | NotWritten:
    """Write a report and return its path, or the reason why there is none."""
    if isinstance(directory, NotWritten):
        return directory
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return NotWritten(f"could not be written: {error}", is_failure=True)
    return path


def write_report_or_warn(directory: Path | NotWritten, name: str, text: str) -> Path | None:
    """Write a report and return its path; where that fails, warn and return None."""
    written = write_report(directory, name, text)
    if isinstance(written, Path):
        return written
    if written.is_failure:
        warnings.warn(f"The report {name} {written.reason}. Training goes on.", stacklevel=2)
    return None


def write_report_on_rank_zero(
    directory: Path | NotWritten, name: str, text: str, ranks: RankGather
) -> Path | NotWritten:
    """Write a report on rank 0, and return on every rank its path or the reason why there is none. Collective."""
    if isinstance(directory, NotWritten):
        return directory
    written = write_report(directory, name, text) if ranks.rank == 0 else directory / name
    of_rank_zero: Path | NotWritten = ranks.objects(written)[0]
    return of_rank_zero
