"""Takes the losses out of what a training or a validation step has returned or logged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_memtools._lightning import EvaluationBatchEnd, values_logged_in_step
from lightning_memtools.reporting.loss_names import likely_losses, scalars_of


def checked_names(argument: str, value: str | Sequence[str] | None) -> list[str] | None:
    """Return the names of losses that a user gave as one name or several; None to find them.

    Raises:
        ValueError: There are none, or one is no text.
    """
    if value is None:
        return None
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f'{argument}={value!r} names no loss. Give a name such as {argument}="my_loss", several names, or None to '
            "find it."
        )
    return names


def training_losses(
    trainer: Trainer, module: LightningModule, outputs: Any, names: Sequence[str] | None, *, was_asked: bool
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the losses of a training step, before the division of gradient accumulation, and the names of all scalars.

    Args:
        trainer: The Trainer, after the step.
        module: The module that trains.
        outputs: The step's output, as Lightning passes it to `on_train_batch_end`.
        names: The losses to take; None takes everything that has "loss" in its name.
        was_asked: False takes the returned loss alone where Lightning optimizes.
    """
    candidates = scalars_of(outputs)
    accumulated = trainer.accumulate_grad_batches
    if module.automatic_optimization:
        if accumulated > 1 and "loss" in candidates:
            candidates["loss"] = candidates["loss"] * accumulated  # Lightning divided it
        if not was_asked:
            return ({"loss": candidates["loss"]} if "loss" in candidates else {}), set()
    if names is None or any(name not in candidates for name in names):
        candidates = values_logged_in_step(trainer) | candidates
    if names is None:
        return {name: candidates[name] for name in likely_losses(candidates)}, set()
    return {name: candidates[name] for name in names if name in candidates}, set(candidates)


def returned_losses(end: EvaluationBatchEnd, names: Sequence[str] | None) -> Iterator[tuple[str, Tensor, int]]:
    """Yield name, value and weight of the losses that a validation step returned; the weight is the batch size."""
    returned = scalars_of(end.outputs)
    suffix = loader_suffixes(end.trainer)[end.dataloader_idx]
    weight = _batch_size(end.batch) if returned else 1
    for name in likely_losses(returned) if names is None else names:
        if name in returned:
            yield name + suffix, returned[name], weight


def loader_suffixes(trainer: Trainer) -> list[str]:
    """Return what Lightning adds to a metric's name for each validation loader: nothing if there is only one."""
    n_loaders = len(trainer.num_val_batches)
    return [f"/dataloader_idx_{i}" for i in range(n_loaders)] if n_loaders > 1 else [""]


def _batch_size(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # a batch without tensors: all batches have the same weight
        return 1
