"""Finds the losses among the scalars that a step returns or logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

# The usual names of a validation loss; the first that exists is taken.
_USUAL = ("val_loss", "val/loss", "loss/val", "valid_loss", "valid/loss", "validation_loss", "validation/loss", "loss")


def scalars_of(outputs: Any) -> dict[str, Tensor]:
    """Return the one-element tensors of a step's output by name; a tensor alone is the "loss"."""
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, Mapping):
        return {}
    return {str(name): value for name, value in outputs.items() if isinstance(value, Tensor) and value.numel() == 1}


def likely_losses(names: Iterable[str]) -> list[str]:
    """Return the names of losses: the usual name if it is there, else every name that contains "loss".

    With several data loaders, names end with "/dataloader_idx_<i>", and one name may be found for each.
    """
    names = list(names)
    for usual in _USUAL:
        found = [name for name in names if without_loader(name) == usual]
        if found:
            return found
    return [name for name in names if "loss" in name.lower()]


def without_loader(name: str) -> str:
    """Return a metric's name without the data loader that Lightning adds."""
    return name.split("/dataloader_idx_", maxsplit=1)[0]


def tags_of(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Return loss name to tag: the prefix itself for a single loss, `<prefix>/<name>` for several."""
    names = list(names)
    if len(names) == 1:
        return {names[0]: prefix}
    if len({without_loader(name) for name in names}) == 1:
        return {name: f"{prefix}/{name.removeprefix(without_loader(name) + '/')}" for name in names}
    return {name: f"{prefix}/{name}" for name in names}
