"""Reports as files: `<log_dir>/memtools/<name>`."""

from __future__ import annotations

import warnings
from pathlib import Path

from lightning.pytorch import Trainer


def report_directory(trainer: Trainer) -> Path | None:
    """Where reports of this run go; None where it keeps no files (fast_dev_run).

    Call it on every rank or on none: Trainer.log_dir is a broadcast from rank 0.
    """
    log_dir = trainer.log_dir
    if log_dir is None or getattr(trainer, "fast_dev_run", False):
        return None
    return Path(log_dir) / "memtools"


def write_report(directory: Path | None, name: str, text: str) -> Path | None:
    """Write a report and return its path; None, with a warning, where the directory cannot be written to."""
    if directory is None:
        return None
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        warnings.warn(f"The report {name} could not be written: {error}. Training goes on.", stacklevel=2)
        return None
    return path
