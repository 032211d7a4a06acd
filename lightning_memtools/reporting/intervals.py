"""When a callback is due to log."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_memtools._lightning import is_accumulating, training_step


def checked_interval(every_n_steps: int | None) -> int | None:
    """Give back an interval in training steps, or None for the Trainer's own.

    Raises:
        ValueError: It is below 1.
    """
    if every_n_steps is not None and every_n_steps < 1:
        raise ValueError(
            f"every_n_steps={every_n_steps} is not an interval. Give a number of training steps from 1 upwards, "
            "or None for the Trainer's log_every_n_steps."
        )
    return every_n_steps


def is_due(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether the training step that is ending is one to log: the same steps at which `self.log` writes."""
    interval = trainer.log_every_n_steps if every_n_steps is None else every_n_steps  # type: ignore[attr-defined]
    # log_every_n_steps=0 means never.
    return interval > 0 and (training_step(trainer) + 1) % interval == 0 and not is_accumulating(trainer)
