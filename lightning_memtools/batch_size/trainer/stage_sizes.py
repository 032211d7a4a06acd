"""Reads and sets the batch sizes of a Trainer's stages, and makes loops use loaders of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import (
    correct_logged_hparam,
    forget_saved_arguments,
    loop_of,
    mode_of,
    part_of_lightning,
    source_of,
)
from lightning_memtools._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_memtools.batch_size.resized_loaders import CannotResizeError, resize_loader
from lightning_memtools.batch_size.size_limits import STAGES
from lightning_memtools.memory.loader_sizes import batch_size_of
from lightning_memtools.memory.peaks import Stage


class StageSizes:
    """Reads and sets the batch sizes of a Trainer's stages.

    A `*_dataloader` hook reads its size from an attribute or hyperparameter of the model or the data module. The hook
    is called while that attribute holds the stage's size, so that training and validation can have different sizes
    under the same name. DataLoaders that were passed to the Trainer are replaced by resized copies.

    Args:
        trainer: The Trainer, during `fit`.
        names: The names of batch size attributes. One that begins with a stage (`val_batch_size`) is for that stage.

    Attributes:
        configured: The size of each stage before any change. Stages whose size is unknown are left out.
        of_hooks: The sizes in `configured` of those stages whose loaders come from a hook.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str]) -> None:
        self._trainer, self._names = trainer, list(names)
        owners = {"model": trainer.lightning_module, "datamodule": getattr(trainer, "datamodule", None)}
        self._owners = {name: owner for name, owner in owners.items() if owner is not None}
        self._passed: dict[Stage, tuple[Any, Any]] = {}  # the source, and the loaders
        read = {stage: self._read(stage) for stage in STAGES}
        self.configured = {stage: size for stage, size in read.items() if size is not None}
        self.of_hooks = {stage: size for stage, size in self.configured.items() if self._is_hooked(stage)}

    def _is_hooked(self, stage: Stage) -> bool:
        return bool(source_of(loop_of(self._trainer, stage)).is_module())

    def check_names(self, stages: Sequence[Stage]) -> None:
        """Check that the attributes that hold the batch size exist, if a `*_dataloader` hook makes loaders with them.

        Raises:
            ValueError: A name is not found. The message lists the objects searched, and similar names in them.
        """
        for name in self._names if any(map(self._is_hooked, stages)) else ():
            if any(True for _ in self._holders(name)):
                continue
            places = [
                place for owner in self._owners.values() for place in (vars(owner), getattr(owner, "hparams", {}))
            ]
            similar = dict.fromkeys(str(key) for place in places for key in place if "batch" in str(key).lower())
            searched = ", ".join(f"{owner}{part}" for owner in self._owners for part in ("", ".hparams"))
            raise ValueError(
                f"No {name!r} in {searched}. Similar names there: {', '.join(similar) or 'none'}. Set batch_arg_name "
                "to the name that the *_dataloader hooks read, add that attribute, or pass the DataLoaders to the "
                "Trainer directly."
            )

    def names_for(self, stage: Stage) -> list[str]:
        """Return the attribute names that begin with the stage's name; if there are none, those without a prefix."""
        own = [name for name in self._names if name.startswith(f"{stage}_")]
        return own or [name for name in self._names if not name.startswith(tuple(f"{other}_" for other in STAGES))]

    def write(self, stage: Stage, size: int, *, for_loggers: bool = False) -> None:
        """Set a stage's attributes and hyperparameters to `size`; with `for_loggers`, also those that are logged.

        Raises:
            AttributeError: An attribute cannot be set, such as a property without a setter.
        """
        for name in self.names_for(stage):
            for holder in self._holders(name):
                setattr(holder, name, size)
            for owner in self._owners.values() if for_loggers else ():
                correct_logged_hparam(owner, name, size)

    def set(self, stage: Stage, size: int) -> None:
        """Make the stage's loop get loaders with this batch size the next time that it requests loaders.

        Raises:
            CannotResizeError: The size of a DataLoader that was passed to the Trainer cannot be set from outside.
        """
        source = source_of(loop_of(self._trainer, stage))
        if source.is_module():
            source.dataloader = _SizedHook(source, stage, self, size)
            return
        _, loaders = self._passed.setdefault(stage, (source, source.instance))
        try:
            source.instance = _map_loaders(loaders, lambda loader: resize_loader(loader, size))
        except CannotResizeError as error:
            raise CannotResizeError(f"{error}{hint_to_leave_out(stage)}") from None

    def undo(self) -> None:
        """Restore the DataLoaders passed to the Trainer, and how loops call `*_dataloader` hooks. Idempotent."""
        for source, loaders in self._passed.values():
            source.instance = loaders
        self._passed.clear()
        for loop in (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop):
            vars(source_of(loop)).pop("dataloader", None)

    @contextmanager
    def written(self, stage: Stage, size: int) -> Iterator[None]:
        """Within this context, set the attributes that hold a stage's batch size to `size`; restore them on exit."""
        holders = [(holder, name) for name in self.names_for(stage) for holder in self._holders(name)]
        before = [getattr(holder, name) for holder, name in holders]
        self.write(stage, size)
        try:
            yield
        finally:
            for (holder, name), value in zip(holders, before, strict=True):
                setattr(holder, name, value)

    def _read(self, stage: Stage) -> int | None:
        if self._is_hooked(stage):
            values = [getattr(holder, name) for name in self.names_for(stage) for holder in self._holders(name)]
            return next((value for value in values if isinstance(value, int)), None)
        loaders = tree_leaves(source_of(loop_of(self._trainer, stage)).instance)
        return batch_size_of(loaders[0]) if loaders else None

    def _holders(self, name: str) -> Iterator[Any]:
        """Yield each object that has the attribute `name`, among the model, data module and their hyperparameters."""
        for owner in self._owners.values():
            yield from (one for one in (getattr(owner, "hparams", None), owner) if hasattr(one, name))


class _SizedHook:
    """Wraps the method from which a Lightning loop gets its data loaders, to change their batch size."""

    def __init__(self, source: Any, stage: Stage, sizes: StageSizes, size: int) -> None:
        self._source, self._stage, self._sizes, self._size = source, stage, sizes, size

    def __call__(self) -> Any:
        with self._sizes.written(self._stage, self._size):
            return type(self._source).dataloader(self._source)


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Return True if a stage has loaders, and settings such as `limit_val_batches` allow at least one batch."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    return bool(trainer.enable_validation if stage == "val" else trainer.limit_train_batches != 0)


def hint_to_leave_out(stage: Stage) -> str:
    """Return the end of an error message about a loader that cannot be resized: how to exclude its stage."""
    return ' Or tune training alone: BatchSizeTuner(stages=("train",)).' if stage == "val" else ""


def _map_loaders(loaders: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each loader in a nested collection, and return the collection of results."""
    kind: Any = type(loaders)
    if issubclass(kind, part_of_lightning("utilities").CombinedLoader):
        return kind(_map_loaders(loaders.iterables, change), mode_of(loaders))
    flat, structure = tree_flatten(loaders)
    changed = [change(loader) for loader in flat]
    for loader in changed:
        forget_saved_arguments(loader)
    return tree_unflatten(changed, structure)
