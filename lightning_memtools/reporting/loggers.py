"""Writes scalars and texts to every logger of a Trainer, and says when a callback is due to log.

If a logger fails, one warning names it, and training goes on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_memtools._lightning import is_accumulating, training_step
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.sizes import is_count
from lightning_memtools.warning_categories import DegradedWarning

# The loggers of a Trainer that have failed. All its callbacks share this, so that a broken logger gives one warning and
# not one for each callback. Weak on both sides: nothing outlives its Trainer.
_FAILED: weakref.WeakKeyDictionary[Trainer, weakref.WeakSet[Logger]] = weakref.WeakKeyDictionary()

# Who hears what is logged of a Trainer on this rank, also without a logger.
_HEARERS: weakref.WeakKeyDictionary[Trainer, Callable[[Mapping[str, float]], None]] = weakref.WeakKeyDictionary()


def hear_scalars(trainer: Trainer, hear: Callable[[Mapping[str, float]], None]) -> Callable[[], None]:
    """Call `hear` whenever this package logs scalars for a Trainer. Return a function that stops these calls."""
    _HEARERS[trainer] = hear
    return lambda: _HEARERS.pop(trainer, None) and None


def log_scalars(trainer: Trainer, scalars: Mapping[str, float], step: int) -> None:
    """On rank 0, write scalars to every logger, except loggers that have a `history` dict, such as scVI's."""
    if trainer in _HEARERS:
        _HEARERS[trainer](scalars)
    if not scalars or not trainer.is_global_zero:
        return

    def write(logger: Logger) -> None:
        # scVI's logger: a library gives these to its users as the history of their model.
        if isinstance(getattr(logger, "history", None), dict):
            return
        separator = "." if keeps_metrics_in_files(logger) else logger.group_separator
        named = scalars if separator == "/" else {tag.replace("/", separator): v for tag, v in scalars.items()}
        logger.log_metrics(dict(named), step)

    for_each_logger(trainer, write)


def keeps_metrics_in_files(logger: Logger) -> bool:
    """Return True if a logger writes each metric to a file named after the tag, as MLflow does without a database.

    With such a logger, the tag `loss/train` creates a directory `loss`, so no file for the tag `loss` can exist.
    """
    uri = getattr(getattr(logger, "experiment", None), "tracking_uri", None)
    return isinstance(uri, str) and urlsplit(uri).scheme in {"", "file"}


def log_text(trainer: Trainer, tag: str, markdown: str, step: int = 0) -> None:
    """On rank 0, write a markdown text to every logger that accepts text (TensorBoard, W&B, MLflow, Comet)."""
    if trainer.is_global_zero:
        for_each_logger(trainer, lambda logger: _write_text(logger, tag, markdown, step))


def for_each_logger(trainer: Trainer, write: Callable[[Logger], None]) -> None:
    """Call `write` with each logger of the Trainer. If a logger raises, warn once and continue."""
    for logger in trainer.loggers:
        try:
            write(logger)
        except Exception as error:  # noqa: BLE001, whatever a logger raises must not end hours of training
            failed = _FAILED.setdefault(trainer, weakref.WeakSet())
            if logger in failed:
                continue
            failed.add(logger)
            warnings.warn(
                f"{type(logger).__name__} failed while writing ({in_one_line(error)}). Training goes on; "
                "what lightning_memtools logs may be missing there. This warning is given once.",
                DegradedWarning,
                stacklevel=2,
            )


def _write_text(logger: Logger, tag: str, markdown: str, step: int) -> None:
    # By what they can do, not by type: a callback of `lightning` also serves a logger of `pytorch_lightning`.
    experiment: Any = getattr(logger, "experiment", None)  # a logger need not have one, and takes no text then
    if hasattr(experiment, "add_text"):  # TensorBoard
        experiment.add_text(tag, markdown, step)
    elif hasattr(logger, "log_text"):  # W&B: a table with one cell
        logger.log_text(key=tag, columns=["markdown"], data=[[markdown]])
    elif hasattr(experiment, "log_text") and hasattr(logger, "run_id"):  # MLflow: an artifact of the run
        experiment.log_text(logger.run_id, markdown, f"{tag}.md")
    elif hasattr(experiment, "log_text"):  # Comet
        experiment.log_text(markdown, step=step, metadata={"tag": tag})


def checked_interval(every_n_steps: int | None) -> int | None:
    """Validate a logging interval in training steps, and return it. None stands for `Trainer.log_every_n_steps`.

    Raises:
        ValueError: The interval is not a whole number, or it is below 1.
    """
    if every_n_steps is not None and not is_count(every_n_steps):
        raise ValueError(
            f"every_n_steps={every_n_steps!r} is not an interval. Give a number of training steps from 1 upwards, "
            "or None for the Trainer's log_every_n_steps."
        )
    return every_n_steps


FIRST_STEPS = frozenset({0, 1, 2, 4, 8, 16, 32})
"""The training steps that are logged whatever the interval, so that a short run has curves and its peaks are seen."""


def is_due(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Return True if the training step that is ending should be logged: a few early steps, then every n-th step.

    Args:
        trainer: The Trainer.
        every_n_steps: The interval; None stands for the Trainer's `log_every_n_steps`, where 0 means never.
    """
    interval = trainer.log_every_n_steps if every_n_steps is None else every_n_steps  # type: ignore[attr-defined]
    step = training_step(trainer)
    return interval > 0 and ((step + 1) % interval == 0 or step in FIRST_STEPS) and not is_accumulating(trainer)
