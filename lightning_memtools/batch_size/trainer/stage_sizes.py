"""Reads and sets the batch sizes of a Trainer's stages, and makes loops use loaders of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import correct_logged_hparam, forget_saved_arguments, loop_of, source_of
from lightning_memtools._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_memtools.batch_size.resized_loaders import resize_loader
from lightning_memtools.batch_size.size_limits import STAGES
from lightning_memtools.memory.loader_sizes import batch_size_of
from lightning_memtools.memory.peaks import Stage


class StageSizes:
    """Reads and sets the batch sizes of training and validation ("stages").

    A `*_dataloader` hook reads its size from an attribute or hyperparameter of the model or the data module. This
    class sets the attribute whenever a hook is called, so that training and validation can have different sizes even
    if both hooks read the same attribute. DataLoaders passed to the Trainer are replaced by resized copies.

    Args:
        trainer: The Trainer, during `fit`.
        name: The name of the attribute or hyperparameter that holds the batch size.

    Attributes:
        configured: The original batch size of each stage. Stages whose size is unknown are left out.
        of_hooks: The sizes in `configured` for those stages whose loaders come from a `*_dataloader` hook.
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._name = trainer, name
        owners = {"model": trainer.lightning_module, "datamodule": getattr(trainer, "datamodule", None)}
        self._owners = {place: owner for place, owner in owners.items() if owner is not None}
        self._passed: dict[Stage, tuple[Any, Any]] = {}  # the source, and the loaders
        read = {stage: self._read(stage) for stage in STAGES}
        self.configured = {stage: size for stage, size in read.items() if size is not None}
        self.of_hooks = {stage: size for stage, size in self.configured.items() if self._is_hooked(stage)}

    def _is_hooked(self, stage: Stage) -> bool:
        return bool(source_of(loop_of(self._trainer, stage)).is_module())

    def check_name(self, stages: Sequence[Stage]) -> None:
        """Check that the batch size attribute exists, if the loaders of these stages come from `*_dataloader` hooks.

        Raises:
            ValueError: The name is not found. The message lists the objects searched.
        """
        if any(map(self._is_hooked, stages)) and not self._holders():
            searched = ", ".join(f"{owner}{part}" for owner in self._owners for part in ("", ".hparams"))
            raise ValueError(
                f"No {self._name!r} in {searched}. Set batch_arg_name to the name that the *_dataloader hooks read, "
                "add that attribute, or pass the DataLoaders to the Trainer directly."
            )

    def write(self, size: int, *, for_loggers: bool = False) -> None:
        """Set the batch size attributes to `size`; with `for_loggers`, also the hyperparameters that loggers get.

        Raises:
            AttributeError: An attribute cannot be set, for instance a property without a setter.
        """
        for holder in self._holders():
            setattr(holder, self._name, size)
        for owner in self._owners.values() if for_loggers else ():
            correct_logged_hparam(owner, self._name, size)

    def set(self, stage: Stage, size: int) -> None:
        """Make the next loaders of a stage yield batches of this size.

        Raises:
            CannotResizeError: The batch size of a DataLoader that was passed to the Trainer cannot be changed.
        """
        source = source_of(loop_of(self._trainer, stage))
        if source.is_module():
            source.dataloader = partial(self._call_hook, source, size)
            return
        _, loaders = self._passed.setdefault(stage, (source, source.instance))
        flat, structure = tree_flatten(loaders)
        resized = [resize_loader(loader, size) for loader in flat]
        for loader in resized:
            forget_saved_arguments(loader)
        source.instance = tree_unflatten(resized, structure)

    def _call_hook(self, source: Any, size: int) -> Any:
        """Set the batch size attributes to `size`, call the `*_dataloader` hook of `source`, and restore them."""
        holders = self._holders()
        before = [getattr(holder, self._name) for holder in holders]
        self.write(size)
        try:
            return type(source).dataloader(source)
        finally:
            for holder, value in zip(holders, before, strict=True):
                setattr(holder, self._name, value)

    def undo(self) -> None:
        """Restore the DataLoaders passed to the Trainer, and stop changing attributes for hooks. Idempotent."""
        for source, loaders in self._passed.values():
            source.instance = loaders
        self._passed.clear()
        for stage in STAGES:
            vars(source_of(loop_of(self._trainer, stage))).pop("dataloader", None)

    def _read(self, stage: Stage) -> int | None:
        if self._is_hooked(stage):
            values = [getattr(holder, self._name) for holder in self._holders()]
            return next((value for value in values if isinstance(value, int)), None)
        loaders = tree_leaves(source_of(loop_of(self._trainer, stage)).instance)
        return batch_size_of(loaders[0]) if loaders else None

    def _holders(self) -> list[Any]:
        """Return the objects that have the batch size attribute: model, data module, or the `hparams` of either."""
        places = [place for owner in self._owners.values() for place in (getattr(owner, "hparams", None), owner)]
        return [place for place in places if hasattr(place, self._name)]


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Return True if a stage has loaders that are not switched off by a setting such as `limit_val_batches=0`."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    return bool(trainer.enable_validation if stage == "val" else trainer.limit_train_batches != 0)
