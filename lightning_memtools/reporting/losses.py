"""Which of the scalars that a step returns or logs are its losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

# Under these names a validation loss is usually logged; the first that exists is it.
_USUAL = ("val_loss", "val/loss", "loss/val", "valid_loss", "valid/loss", "validation_loss", "validation/loss", "loss")


def scalars_of(outputs: Any) -> dict[str, Tensor]:
    """The one-element tensors of a step's output: a tensor alone is the "loss"."""
    if isinstance(outputs, Tensor):
        outputs = {"loss": outputs}
    if not isinstance(outputs, Mapping):
        return {}
    return {str(name): value for name, value in outputs.items() if isinstance(value, Tensor) and value.numel() == 1}


def likely_losses(names: Iterable[str]) -> list[str]:
    """Which of these names are losses: the usual one if it is there, else every name that has "loss" in it.

    With several data loaders, whose names end with "/dataloader_idx_<i>", the same for each.
    """
    names = list(names)
    for usual in _USUAL:
        found = [name for name in names if without_loader(name) == usual]
        if found:
            return found
    return [name for name in names if "loss" in name.lower()]


def without_loader(name: str) -> str:
    """A metric's name without the data loader that Lightning adds."""
    return name.split("/dataloader_idx_", maxsplit=1)[0]


def tags_of(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Loss name to tag: the prefix itself for a single loss, `<prefix>/<name>` for several."""
    names = list(names)
    if len(names) == 1:
        return {names[0]: prefix}
    if len({without_loader(name) for name in names}) == 1:
        return {name: f"{prefix}/{name.removeprefix(without_loader(name) + '/')}" for name in names}
    return {name: f"{prefix}/{name}" for name in names}
