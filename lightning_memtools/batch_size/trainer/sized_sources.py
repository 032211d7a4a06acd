"""Attributes that hold a batch size, and data loaders that follow the size of their stage."""

from __future__ import annotations

import difflib
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
    put_loader_classes_back,
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
            `loader_kwargs.batch_size` is an item of the dict in an attribute.
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
            searched = [f"{owner}{part}" for owner in self._owners for part in ("", ".hparams")]
            similar = self._similar(name)
            raise ValueError(
                f"No {name!r} in {', '.join(searched)}. "
                + (f"Similar names there: {', '.join(similar)}. " if similar else "Nothing there has a similar name. ")
                + "Set batch_arg_name to the name that the *_dataloader hooks read, add that attribute, or pass the "
                "DataLoaders to the Trainer directly."
            )

    def names_for(self, stage: Stage) -> list[str]:
        """Return the names that hold a stage's size: its own, or else the general ones."""
        own = [name for name in self._names if name.startswith(f"{stage}_")]
        general = [name for name in self._names if not name.startswith(tuple(f"{other}_" for other in STAGES))]
        return own or general

    def read(self, stage: Stage) -> int | None:
        """Return the present size of a stage; None where no attribute holds one."""
        for name in self.names_for(stage):
            for read, _ in self._holders(name):
                value = read()
                if isinstance(value, int):
                    return value
        return None

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
        attribute, _, key = name.partition(".")
        for owner in self._owners.values():
            hparams = getattr(owner, "hparams", None)
            if isinstance(hparams, Mapping) and name in hparams:
                yield lambda held=hparams: held[name], lambda value, held=hparams: held.__setitem__(name, value)  # type: ignore[misc]
            if hasattr(owner, name):
                yield (
                    lambda owner=owner: getattr(owner, name),  # type: ignore[misc]
                    lambda value, owner=owner: setattr(owner, name, value),  # type: ignore[misc]
                )
            items = getattr(owner, attribute, None) if key else None
            if isinstance(items, dict) and key in items:
                yield lambda items=items: items[key], lambda value, items=items: items.__setitem__(key, value)  # type: ignore[misc]

    def _similar(self, name: str) -> list[str]:
        known: dict[str, None] = {}
        for owner in self._owners.values():
            known.update(dict.fromkeys(key for key in vars(owner) if not key.startswith("_")))
            known.update(dict.fromkeys(str(key) for key in getattr(owner, "hparams", None) or ()))
            held = [(attribute, items) for attribute, items in vars(owner).items() if type(items) is dict]
            known.update(dict.fromkeys(f"{attribute}.{key}" for attribute, items in held for key in items))
        close = difflib.get_close_matches(name, known, n=5)
        return list(dict.fromkeys([*close, *(key for key in known if "batch" in key.rpartition(".")[2].lower())]))


class SizedLoaders:
    """Stands in for the `dataloader` method of a loop's source, and returns loaders with the size of the stage.

    Loaders that were passed to the Trainer are resized. Hooks are called while their attribute holds the stage's size,
    so that training and validation can have different sizes under the same name.

    Args:
        source: The object that the loop asks for its loaders.
        stage: The loop's stage.
        attributes: Hold the batch size.
        size_of: Returns the stage's size; with None the loaders keep theirs.

    Attributes:
        alter: Changes each loader, if given.
    """

    def __init__(
        self, source: Any, stage: Stage, attributes: BatchSizeAttributes, size_of: Callable[[Stage], int | None]
    ) -> None:
        self.alter: Callable[[Any], Any] | None = None
        self._source = source
        self._stage = stage
        self._attributes = attributes
        self._size_of = size_of

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"alter": None}  # of a trial; a Trainer may be copied to another process in it

    def __call__(self) -> Any:
        """Return the loaders, with the size of the stage."""
        try:
            loaders = self._sized()
            return loaders if self.alter is None else _map_loaders(loaders, self.alter)
        except BaseException:
            put_loader_classes_back()
            raise

    def _sized(self) -> Any:
        size, source = self._size_of(self._stage), self._source
        if size is None:
            return type(source).dataloader(source)
        if source.is_module():
            with self._attributes.written(self._stage, size):
                return type(source).dataloader(source)
        try:
            return _map_loaders(source.instance, lambda loader: resize_loader(loader, size))
        except CannotResizeError as error:
            raise CannotResizeError(f"{error}{hint_to_leave_out(self._stage)}") from None


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
    for before, after in zip(flat, changed, strict=True):
        if after is not before:
            forget_saved_arguments(after)
    return tree_unflatten(changed, structure)


def wrap_sources(
    trainer: Trainer, stages: Sequence[Stage], attributes: BatchSizeAttributes, size_of: Callable[[Stage], int | None]
) -> dict[Stage, SizedLoaders]:
    """Have the source of each stage's loop return loaders of the stage's size; return what stands in for its method."""
    sources = {stage: source_of(loop_of(trainer, stage)) for stage in stages}
    sized = {stage: SizedLoaders(source, stage, attributes, size_of) for stage, source in sources.items()}
    for stage, source in sources.items():
        source.dataloader = sized[stage]
    return sized


def unwrap_sources(trainer: Trainer) -> None:
    """Undo `wrap_sources`: the loops build their data loaders as before. Idempotent."""
    fit, other = trainer.fit_loop, (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in (fit, fit.epoch_loop.val_loop, *other):
        vars(source_of(loop)).pop("dataloader", None)


def size_of_passed(trainer: Trainer, stage: Stage) -> int | None:
    """Return the size of the loaders that were passed to the Trainer; None for those of a hook."""
    source = source_of(loop_of(trainer, stage))
    loaders = [] if source.is_module() else tree_leaves(source.instance)
    return batch_size_of(loaders[0]) if loaders else None


def has_data(trainer: Trainer, stage: Stage) -> bool:
    """Return True if a stage has batches to run."""
    if not source_of(loop_of(trainer, stage)).is_defined():
        return False
    if stage == "val":
        return bool(trainer.enable_validation) if trainer.state.fn == TrainerFn.FITTING else True
    return bool(getattr(trainer, f"limit_{stage}_batches") != 0)
