"""Writes reports as files: `<log_dir>/memtools/<name>`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lightning_memtools.reporting.ranks import RankGather
from lightning_memtools.warning_categories import DegradedWarning


@dataclass(frozen=True, slots=True)
class NotWritten:
    """The reason why a report was not written to a file.

    Attributes:
        reason: The reason, worded so that it can follow the report's name, such as "could not be written: [Errno 28] No
            space left on device".
        is_failure: True if writing failed, False if the run keeps no files.
    """

    reason: str
    is_failure: bool = False


def fixed_directory(directory: str | None) -> str | None:
    """Convert a directory to an absolute path, so that a change of the working directory does not affect it."""
    return None if directory is None else str(Path(directory).absolute())


NO_RUN = NotWritten("not written: no run has begun")
# The folders of Trainers without a logger for which `memtools run` asks for files.
_ASKED_FOR: weakref.WeakKeyDictionary[Trainer, Path] = weakref.WeakKeyDictionary()


def keep_files_in(trainer: Trainer, directory: Path) -> None:
    """Set the report directory of a Trainer that has no logger. Later calls for the same Trainer have no effect."""
    _ASKED_FOR.setdefault(trainer, directory)


def report_directory(trainer: Trainer, directory: str | None = None) -> Path | NotWritten:
    """Return the directory for this run's reports, or the reason why the run keeps no files.

    By default, this is a folder in the first logger's directory, or below `default_root_dir` if it has none.
    Call this on every rank or on none, because rank 0 broadcasts its directory.

    Args:
        trainer: The Trainer.
        directory: The directory that the user gave to the callback. If it is given, it is returned unchanged.
    """
    if directory is not None:
        return Path(directory)
    if not trainer.loggers:
        if trainer in _ASKED_FOR:
            return _ASKED_FOR[trainer]
        # Trainer.log_dir is the working directory then, and nobody asked for files there.
        return NotWritten("not written: this run keeps no files (logger=False)")
    if getattr(trainer, "fast_dev_run", False):
        return NotWritten("not written: this run keeps no files (fast_dev_run)")
    mine = _run_directory(trainer) if trainer.is_global_zero else ""  # rank 0 knows the version of the run
    folder = trainer.strategy.broadcast(mine)
    if "://" in folder:
        return NotWritten(
            f"not written: this run keeps its files at {folder}, and reports need a local folder, which the argument "
            "directory= of the callback names"
        )
    return Path(folder).absolute() / "memtools"


def _run_directory(trainer: Trainer) -> str:
    """Return the folder of this run in the first logger's directory. ModelCheckpoint saves there, too."""
    logger = trainer.loggers[0]
    log_dir = getattr(logger, "log_dir", None)  # TensorBoardLogger, CSVLogger: a folder for each run
    if isinstance(log_dir, str | os.PathLike):
        return str(log_dir)
    # Some loggers have None, and mocks return any object.
    root = logger.save_dir if isinstance(logger.save_dir, str | os.PathLike) else trainer.default_root_dir
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(root, str(logger.name), version)  # noqa: PTH118, may be a URL


def write_report(directory: Path | NotWritten, name: str, text: str) -> Path | NotWritten:
    """Write a report and return its path. If `directory` is a NotWritten or writing fails, return the reason."""
    return write_file(directory, name, lambda path: path.write_text(text, encoding="utf-8"))


def write_file(directory: Path | NotWritten, name: str, write: Callable[[Path], object]) -> Path | NotWritten:
    """Write a file and return its path. If `directory` is a NotWritten or writing fails, return the reason.

    `write` is called with a temporary path, so that an existing file stays unchanged if writing fails.
    """
    if isinstance(directory, NotWritten):
        return directory
    path, part = directory / name, directory / f".{name}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return NotWritten(f"could not be written: {error}", is_failure=True)
    return path


def write_report_or_warn(directory: Path | NotWritten, name: str, text: str) -> Path | None:
    """Write a report and return its path; None if it was not written. Warn if writing failed."""
    written = write_report(directory, name, text)
    if isinstance(written, Path):
        return written
    if written.is_failure:
        warnings.warn(f"The report {name} {written.reason}. Training goes on.", DegradedWarning, stacklevel=2)
    return None


def write_report_on_rank_zero(
    directory: Path | NotWritten, name: str, text: str, ranks: RankGather
) -> Path | NotWritten:
    """Write a report on rank 0. Every rank must call this, and gets the path or the reason why nothing was written."""
    if isinstance(directory, NotWritten):
        return directory
    written = write_report(directory, name, text) if ranks.rank == 0 else directory / name
    of_rank_zero: Path | NotWritten = ranks.objects(written)[0]
    return of_rank_zero
