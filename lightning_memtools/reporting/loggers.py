"""Writes to every logger of a Trainer. A logger that fails is named once; training goes on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

# Which loggers of a Trainer already failed: all callbacks of that Trainer share it, so that a broken logger gives one
# warning and not one for each of them. Weak on both sides: nothing outlives its Trainer.
_FAILED: weakref.WeakKeyDictionary[Trainer, weakref.WeakSet[Logger]] = weakref.WeakKeyDictionary()


def log_scalars(trainer: Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write scalars to every logger at the given step. Does nothing on ranks above 0."""
    if not scalars or not trainer.is_global_zero:
        return

    def write(logger: Logger) -> None:
        separator = logger.group_separator
        named = scalars if separator == "/" else {tag.replace("/", separator): v for tag, v in scalars.items()}
        logger.log_metrics(dict(named), step)

    for_each_logger(trainer, write)


def log_text(trainer: Trainer, tag: str, markdown: str, step: int = 0) -> None:
    """Offer a markdown text to every logger that takes text (TensorBoard, W&B, MLflow, Comet). Rank 0 only."""
    if trainer.is_global_zero:
        for_each_logger(trainer, lambda logger: _write_text(logger, tag, markdown, step))


def for_each_logger(trainer: Trainer, write: Callable[[Logger], None]) -> None:
    """Call `write` with each logger; one that raises is skipped, with one warning for the Trainer's lifetime."""
    for logger in trainer.loggers:
        try:
            write(logger)
        except Exception as error:  # noqa: BLE001, whatever a logger raises must not end hours of training
            failed = _FAILED.setdefault(trainer, weakref.WeakSet())
            if logger in failed:
                continue
            failed.add(logger)
            warnings.warn(
                f"{type(logger).__name__} failed while writing ({type(error).__name__}: {error}). Training goes on; "
                "what lightning_memtools logs may be missing there. This is said once.",
                stacklevel=2,
            )


def _write_text(logger: Logger, tag: str, markdown: str, step: int) -> None:
    # Abilities, not types: a callback of `lightning` also serves a logger of `pytorch_lightning`.
    experiment: Any = logger.experiment  # type: ignore[attr-defined]
    if hasattr(experiment, "add_text"):  # TensorBoard
        experiment.add_text(tag, markdown, step)
    elif hasattr(logger, "log_text"):  # W&B: a table with one cell
        logger.log_text(key=tag, columns=["markdown"], data=[[markdown]])
    elif hasattr(experiment, "log_text") and hasattr(logger, "run_id"):  # MLflow: an artifact of the run
        experiment.log_text(logger.run_id, markdown, f"{tag}.md")
    elif hasattr(experiment, "log_text"):  # Comet
        experiment.log_text(markdown, step=step, metadata={"tag": tag})
