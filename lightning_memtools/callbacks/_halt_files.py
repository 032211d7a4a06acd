"""What HaltOnNaN leaves on disk. Rank 0 writes, every rank learns the path, and none waits for one that failed."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer

from lightning_memtools._lightning import write_checkpoint
from lightning_memtools.nonfinite.ranks import Ranks

NO_FILES = "not written: this run keeps no files (fast_dev_run)"


def write_on_rank_zero(directory: Path | None, name: str, text: str, ranks: Ranks) -> tuple[Path | None, str]:
    """Write a report: its path, or None and the reason."""
    if directory is None:
        return None, NO_FILES
    path, failure = directory / name, ""
    if ranks.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            failure = f"could not be written: {error}"
    failure = ranks.gather(failure)[0]
    return (None, failure) if failure else (path, "")


def save_on_rank_zero(trainer: Trainer, directory: Path | None, name: str, ranks: Ranks) -> tuple[Path | None, str]:
    """Save a checkpoint: its path, or None and the reason. Call it on every rank."""
    if directory is None:
        return None, NO_FILES
    path, failure = directory / name, ""
    try:
        if ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(trainer, path)
    except Exception as error:  # noqa: BLE001, whatever keeps the checkpoint from being written must not hide the halt
        failure = f"could not be written: {type(error).__name__}: {error}"
    failure = ranks.gather(failure)[0]
    return (None, failure) if failure else (path, "")
