"""Attributes that hold a batch size, and the data loaders of a Trainer's stages with another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

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
from lightning_memtools.memory.loader_sizes import batch_size_of
from lightning_memtools.memory.peaks import STAGES, Stage


class BatchSizeAttributes:
    """Every attribute and hyperparameter of the model and of the data module that holds a batch size.

    Args:
        trainer: Attached to the model and the data module.
        names: The names to look for. One that begins with a stage, such as `val_batch_size`, is for that stage alone.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str]) -> None:
        self._owners: dict[str, Any] = {"model": trainer.lightning_module}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            self._owners["datamodule"] = datamodule
        self._names = list(names)

    def check(self) -> None:
        """Raise for the first name that does not exist.

        Raises:
            ValueError: Names the places that were searched, and similar names there.
        """
        for name in self._names:
            if any(self._holders(name)):
                continue
            places = [vars(owner) for owner in self._owners.values()]
            places += [getattr(owner, "hparams", None) or {} for owner in self._owners.values()]
            similar = dict.fromkeys(str(key) for place in places for key in place if "batch" in str(key).lower())
            searched = ", ".join(f"{owner}{part}" for owner in self._owners for part in ("", ".hparams"))
            raise ValueError(
                f"No {name!r} in {searched}. Similar names there: {', '.join(similar) or 'none'}. Set batch_arg_name "
                "to the name that the *_dataloader hooks read, add that attribute, or pass the DataLoaders to the "
                "Trainer directly."
            )

    def names_for(self, stage: Stage) -> list[str]:
        """Return the names that hold a stage's size: its own, or else the general ones."""
        own = [name for name in self._names if name.startswith(f"{stage}_")]
        return own or [name for name in self._names if not name.startswith(tuple(f"{other}_" for other in STAGES))]

    def read(self, stage: Stage) -> int | None:
        """Return the present size of a stage; None where no attribute holds one."""
        values = [read() for name in self.names_for(stage) for read, _ in self._holders(name)]
        return next((value for value in values if isinstance(value, int)), None)

    def write(self, stage: Stage, size: int, *, for_loggers: bool = False) -> None:
        """Write a stage's size to all of its attributes and hyperparameters.

        Raises:
            AttributeError: An attribute cannot be set, such as a property without a setter.
        """
        for name in self.names_for(stage):
            for _, write in self._holders(name):
                write(size)
            for owner in self._owners.values() if for_loggers else ():
                correct_logged_hparam(owner, name, size)

    @contextmanager
    def written(self, stage: Stage, size: int) -> Iterator[None]:
        """Set the attributes of a stage to this size, and restore them at the end."""
        before = [(write, read()) for name in self.names_for(stage) for read, write in self._holders(name)]
        self.write(stage, size)
        try:
            yield
        finally:
            for write, value in before:
                write(value)

    def _holders(self, name: str) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
        """Yield a getter and a setter for each place that has this name."""
        for owner in self._owners.values():
            hparams = getattr(owner, "hparams", None)
            if isinstance(hparams, Mapping) and name in hparams:
                yield lambda held=hparams: held[name], lambda value, held=hparams: held.__setitem__(name, value)  # type: ignore[misc]
            if hasattr(owner, name):
                yield (
                    lambda owner=owner: getattr(owner, name),  # type: ignore[misc]
                    lambda value, owner=owner: setattr(owner, name, value),  # type: ignore[misc]
                )


class SizedSources:
    """Has the loops of a Trainer ask for loaders of the size of their stage.

    Loaders that were passed to the Trainer are resized. A `*_dataloader` hook is called while its attribute holds the
    stage's size, so that training and validation can have different sizes under the same name.

    Args:
        trainer: The Trainer, in a call of `fit`, `validate`, `test` or `predict`.
        attributes: Hold the batch size.
    """

    def __init__(self, trainer: Trainer, attributes: BatchSizeAttributes) -> None:
        self._trainer = trainer
        self._attributes = attributes
        self._passed: dict[Stage, tuple[Any, Any]] = {}  # the source, and the loaders

    def set(self, stage: Stage, size: int) -> None:
        """Give the stage's loop loaders of this size, the next time that it asks for them.

        Raises:
            CannotResizeError: A loader that was passed does not determine its batch size itself.
        """
        source = source_of(loop_of(self._trainer, stage))
        if source.is_module():
            source.dataloader = _SizedHook(source, stage, self._attributes, size)
            return
        _, loaders = self._passed.setdefault(stage, (source, source.instance))
        try:
            source.instance = _map_loaders(loaders, lambda loader: resize_loader(loader, size))
        except CannotResizeError as error:
            raise CannotResizeError(f"{error}{hint_to_leave_out(stage)}") from None

    def undo(self) -> None:
        """Have the loops ask for their loaders as before. Idempotent."""
        for source, loaders in self._passed.values():
            source.instance = loaders
        self._passed.clear()
        fit, other = self._trainer.fit_loop, ("validate_loop", "test_loop", "predict_loop")
        for loop in (fit, fit.epoch_loop.val_loop, *(getattr(self._trainer, name) for name in other)):
            vars(source_of(loop)).pop("dataloader", None)


class _SizedHook:
    """Stands in for the `dataloader` method of a loop's source."""

    def __init__(self, source: Any, stage: Stage, attributes: BatchSizeAttributes, size: int) -> None:
        self._source, self._stage, self._attributes, self._size = source, stage, attributes, size

    def __call__(self) -> Any:
        with self._attributes.written(self._stage, self._size):
            return type(self._source).dataloader(self._source)


def hint_to_leave_out(stage: Stage) -> str:
    """Return the hint at the end of an error message: how to leave out a stage whose loader keeps its size."""
    return ' Or tune training alone: BatchSizeTuner(stages=("train",)).' if stage == "val" else ""


def _map_loaders(loaders: Any, change: Callable[[Any], Any]) -> Any:
    """Return a collection of loaders of the same structure, each changed."""
    kind: Any = type(loaders)
    if issubclass(kind, part_of_lightning("utilities").CombinedLoader):
        return kind(_map_loaders(loaders.iterables, change), mode_of(loaders))
    flat, structure = tree_flatten(loaders)
    changed = [change(loader) for loader in flat]
    for loader in changed:
        forget_saved_arguments(loader)
    return tree_unflatten(changed, structure)


def size_of_passed(trainer: Trainer, stage: Stage) -> int | None:
    """Return the size of the loaders that were passed to the Trainer; None for those of a hook."""
    source = source_of(loop_of(trainer, stage))
    loaders = [] if source.is_module() else tree_leaves(source.instance)
    return batch_size_of(loaders[0]) if loaders else None


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Return True if a stage has batches to run."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    if stage == "val" and trainer.state.fn == TrainerFn.FITTING:
        return bool(trainer.enable_validation)
    return bool(getattr(trainer, f"limit_{stage}_batches") != 0)
