"""Finds the losses among the values that a training or validation step returns or logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_memtools._lightning import values_logged_in_step
from lightning_memtools.memory.nested_tensors import batch_size_in

# The usual names of a validation loss; the first that exists is taken.
_USUAL = ("val_loss", "val/loss", "loss/val", "valid_loss", "valid/loss", "validation_loss", "validation/loss", "loss")


def scalars_of(outputs: Any) -> dict[str, Tensor]:
    """Return the one-element tensors that a step returned, as a dict by name. A bare tensor is named "loss"."""
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, Mapping):
        return {}
    return {str(name): value for name, value in outputs.items() if isinstance(value, Tensor) and value.numel() == 1}


def likely_losses(names: Iterable[str]) -> list[str]:
    """Return the names of likely losses: a usual name such as "val_loss", or else all names that contain "loss".

    With several data loaders, names end with "/dataloader_idx_<i>", and there may be one loss per loader.
    """
    names = list(names)
    for usual in _USUAL:
        found = [name for name in names if without_loader(name) == usual]
        if found:
            return found
    return [name for name in names if "loss" in name.lower()]


def without_loader(name: str) -> str:
    """Return a metric's name without the suffix "/dataloader_idx_<i>" that Lightning adds."""
    return name.split("/dataloader_idx_", maxsplit=1)[0]


def tags_of(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each loss name to its log tag: `prefix` for a single loss, `<prefix>/<name>` for several."""
    names = list(names)
    if len(names) == 1:
        return {names[0]: prefix}
    if len({without_loader(name) for name in names}) == 1:
        return {name: f"{prefix}/{name.removeprefix(without_loader(name) + '/')}" for name in names}
    return {name: f"{prefix}/{name}" for name in names}


def training_losses(trainer: Trainer, module: LightningModule, outputs: Any) -> dict[str, Tensor]:
    """Return a training step's losses by name, without Lightning's division by the number of accumulated batches.

    In automatic optimization, this is the loss that training_step returned. In manual optimization, these are all
    scalars that it returned or logged under a name that looks like a loss.

    Args:
        trainer: The Trainer, after the step.
        module: The module that is trained.
        outputs: The step's output, as Lightning passes it to `on_train_batch_end`.
    """
    returned = scalars_of(outputs)
    if module.automatic_optimization:
        n = trainer.accumulate_grad_batches  # by which Lightning has divided it
        return {name: loss if n == 1 else loss * n for name, loss in returned.items() if name == "loss"}
    scalars = values_logged_in_step(trainer) | returned
    return {name: scalars[name] for name in likely_losses(scalars)}


def returned_losses(outputs: Any, batch: Any) -> list[tuple[str, Tensor, int]]:
    """Return (name, value, weight) for each loss that a validation step returned; the weight is the batch size."""
    returned = scalars_of(outputs)
    weight = (batch_size_in(batch) if returned else None) or 1
    return [(name, returned[name], weight) for name in likely_losses(returned)]
