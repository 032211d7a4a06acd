"""Finds the losses among the values that a training or validation step returns or logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_memtools._lightning import values_logged_in_step
from lightning_memtools.memory.nested_tensors import batch_size_in

# The usual names of a validation loss; the first that exists is taken.
_USUAL = ("val_loss", "val/loss", "loss/val", "valid_loss", "valid/loss", "validation_loss", "validation/loss", "loss")


def scalars_of(outputs: Any) -> dict[str, Tensor]:
    """Return the one-element tensors in a step's output, by name. A bare tensor gets the name "loss"."""
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, Mapping):
        return {}
    return {str(name): value for name, value in outputs.items() if isinstance(value, Tensor) and value.numel() == 1}


def likely_losses(names: Iterable[str]) -> list[str]:
    """Return the names that are likely losses: a usual one such as "val_loss", otherwise all that contain "loss".

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
    """Return the tag of each loss: `prefix` itself for a single loss, `<prefix>/<name>` for several."""
    names = list(names)
    if len(names) == 1:
        return {names[0]: prefix}
    if len({without_loader(name) for name in names}) == 1:
        return {name: f"{prefix}/{name.removeprefix(without_loader(name) + '/')}" for name in names}
    return {name: f"{prefix}/{name}" for name in names}


def checked_names(argument: str, value: str | Sequence[str] | None) -> list[str] | None:
    """Validate the names of losses that a user gave, and return them as a list; None if `value` is None.

    Raises:
        ValueError: The list is empty, or a name is not a str.
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
    trainer: Trainer, module: LightningModule, outputs: Any, names: Sequence[str] | None
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the losses of a training step, not divided for gradient accumulation, and the names of all its scalars.

    Args:
        trainer: The Trainer, after the step.
        module: The module that is trained.
        outputs: The step's output, as Lightning passes it to `on_train_batch_end`.
        names: The losses to return. None stands for the loss that training_step returned, or in manual optimization for
            all scalars whose names look like a loss.
    """
    returned = scalars_of(outputs)
    if module.automatic_optimization and "loss" in returned and trainer.accumulate_grad_batches > 1:
        returned["loss"] = returned["loss"] * trainer.accumulate_grad_batches  # Lightning divided it
    if module.automatic_optimization and names is None:
        return {name: loss for name, loss in returned.items() if name == "loss"}, set()
    scalars = values_logged_in_step(trainer) | returned
    wanted = likely_losses(scalars) if names is None else names
    return {name: scalars[name] for name in wanted if name in scalars}, set(scalars)


def returned_losses(outputs: Any, batch: Any, names: Sequence[str] | None) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, value, weight) for each loss that a validation step returned. The weight is the batch size."""
    returned = scalars_of(outputs)
    weight = (batch_size_in(batch) if returned else None) or 1
    for name in likely_losses(returned) if names is None else names:
        if name in returned:
            yield name, returned[name], weight


def loader_suffixes(trainer: Trainer) -> list[str]:
    """Return for each validation loader the suffix that its metric names get; "" if there is only one loader."""
    n_loaders = len(trainer.num_val_batches)
    return [f"/dataloader_idx_{i}" for i in range(n_loaders)] if n_loaders > 1 else [""]
