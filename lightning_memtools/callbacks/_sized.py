"""Where a batch size is written down, and data loaders that follow it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_memtools.batchsize.loaders import resize_loader
from lightning_memtools.memory.stages import STAGES, Stage
from lightning_memtools.reporting._lightning import correct_logged_hparam, loop_of, set_source, source_of


class Places:
    """Every attribute and hyperparameter, of the model and of the data module, that holds the batch size.

    Args:
        trainer: Attached to model and data module.
        names: Names to look for. One that begins with a stage, such as `val_batch_size`, is for that stage alone.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str]) -> None:
        self._owners: dict[str, Any] = {"model": trainer.lightning_module}
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            self._owners["datamodule"] = datamodule
        self._names = list(names)
        self.missing = [name for name in self._names if not list(self._holders(name))]

    def check(self) -> None:
        """Raise for the first name that is nowhere.

        Raises:
            ValueError: Where it was looked for, and names like it.
        """
        if not self.missing:
            return
        name = self.missing[0]
        looked = [f"{owner}{part}" for owner in self._owners for part in ("", ".hparams")]
        similar = self._similar(name)
        raise ValueError(
            f"No {name!r} in {', '.join(looked)}. "
            + (f"Similar names there: {', '.join(similar)}. " if similar else "Nothing there has a similar name. ")
            + "Set batch_arg_name to the name that the *_dataloader hooks read, add that attribute, or pass the "
            "DataLoaders to the Trainer directly."
        )

    def names_for(self, stage: Stage) -> list[str]:
        """The names that a stage's size is written under."""
        own = [name for name in self._names if name.startswith(f"{stage}_")]
        general = [name for name in self._names if not name.startswith(tuple(f"{other}_" for other in STAGES))]
        return own or general

    def read(self, stage: Stage) -> int | None:
        """The size that is written there now."""
        for name in self.names_for(stage):
            for holder in self._holders(name):
                value = holder[0]()
                if isinstance(value, int):
                    return value
        return None

    def write(self, stage: Stage, size: int, *, for_loggers: bool = False) -> None:
        """Write a size to every place of a stage.

        Raises:
            AttributeError: A place cannot be written to, such as a property without a setter.
        """
        for name in self.names_for(stage):
            for _, write in self._holders(name):
                write(size)
            for owner in self._owners.values() if for_loggers else ():
                correct_logged_hparam(owner, name, size)

    @contextmanager
    def written(self, stage: Stage, size: int) -> Iterator[None]:
        """A size is there for as long as the context lasts."""
        before = [(write, read()) for name in self.names_for(stage) for read, write in self._holders(name)]
        self.write(stage, size)
        try:
            yield
        finally:
            for write, value in before:
                write(value)

    def _holders(self, name: str) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
        for owner in self._owners.values():
            hparams = getattr(owner, "hparams", None)
            if isinstance(hparams, Mapping) and name in hparams:
                yield lambda held=hparams: held[name], lambda value, held=hparams: held.__setitem__(name, value)  # type: ignore[misc]
            if hasattr(owner, name):
                yield (
                    lambda owner=owner: getattr(owner, name),  # type: ignore[misc]
                    lambda value, owner=owner: setattr(owner, name, value),  # type: ignore[misc]
                )

    def _similar(self, name: str) -> list[str]:
        known: dict[str, None] = {}
        for owner in self._owners.values():
            known.update(dict.fromkeys(key for key in vars(owner) if not key.startswith("_")))
            known.update(dict.fromkeys(str(key) for key in getattr(owner, "hparams", None) or ()))
        close = difflib.get_close_matches(name, known, n=5)
        return list(dict.fromkeys([*close, *(key for key in known if "batch" in key.lower())]))


class SizedSource:
    """Stands where a loop asks for its data loaders, and gives them with the size that the stage should have.

    Loaders that were passed to the Trainer are resized; hooks are called while their attribute holds the stage's size,
    so that training and validation can have different ones under the same name.

    Args:
        original: Whom the loop asked before.
        stage: The loop's stage.
        places: Where sizes are written.
        size_of: Tells the stage's size; None leaves the loaders as they are.
    """

    def __init__(self, original: Any, stage: Stage, places: Places, size_of: Callable[[Stage], int | None]) -> None:
        self.original = original
        self.name = original.name
        self.alter: Callable[[Any], Any] | None = None
        self._stage = stage
        self._places = places
        self._size_of = size_of

    @property
    def instance(self) -> Any:
        """The module or the loaders that the Trainer was given."""
        return self.original.instance

    @instance.setter
    def instance(self, value: Any) -> None:
        self.original.instance = value

    def is_module(self) -> bool:
        """Whether the loaders come from a hook."""
        return bool(self.original.is_module())

    def is_defined(self) -> bool:
        """Whether there are any."""
        return bool(self.original.is_defined())

    def dataloader(self) -> Any:
        """The loaders, of the stage's size."""
        size = self._size_of(self._stage)
        if size is None:
            loaders = self.original.dataloader()
        elif self.is_module():
            with self._places.written(self._stage, size):
                loaders = self.original.dataloader()
        else:
            loaders = each_loader(self.original.dataloader(), lambda loader: resize_loader(loader, size))
        return loaders if self.alter is None else each_loader(loaders, self.alter)


def each_loader(loaders: Any, change: Callable[[Any], Any]) -> Any:
    """A collection of loaders of the same shape, each changed."""
    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(each_loader(loaders.iterables, change), loaders._mode)  # noqa: SLF001, no public name
    if isinstance(loaders, DataLoader) or not isinstance(loaders, (list, tuple, dict)):
        return change(loaders)
    return tree_map(change, loaders)


def wrap_sources(
    trainer: Trainer, stages: Sequence[Stage], places: Places, size_of: Callable[[Stage], int | None]
) -> dict[Stage, SizedSource]:
    """Put a SizedSource into the loop of each stage; one per loop, also when called again."""
    sources: dict[Stage, SizedSource] = {}
    for stage in stages:
        loop = loop_of(trainer, stage)
        source = source_of(loop)
        original = source.original if isinstance(source, SizedSource) else source
        sources[stage] = SizedSource(original, stage, places, size_of)
        set_source(loop, sources[stage])
    return sources


def unwrap_sources(trainer: Trainer) -> None:
    """Take every SizedSource out again. Twice does no harm."""
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop,
             trainer.predict_loop]  # fmt: skip
    for loop in loops:
        source = source_of(loop)
        if isinstance(source, SizedSource):
            set_source(loop, source.original)
