"""Data loaders that follow the size of their stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_memtools._lightning import loop_of, mode_of, put_loader_classes_back, set_source, source_of
from lightning_memtools.batch_size.loaders import resize_loader
from lightning_memtools.batch_size.trainer.places import Places
from lightning_memtools.memory.stages import Stage


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
        try:
            return self._dataloader()
        except BaseException:
            put_loader_classes_back()
            raise

    def _dataloader(self) -> Any:
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
        return CombinedLoader(each_loader(loaders.iterables, change), mode_of(loaders))
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
