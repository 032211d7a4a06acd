"""The sizes that were found, written down and followed by the fit's data loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import forget_loaders, prepared_loaders
from lightning_memtools.batch_size.trainer.places import Places
from lightning_memtools.memory.stages import Stage
from lightning_memtools.state.random_state import RandomState


def write_sizes(places: Places, stages: Sequence[Stage], found: Mapping[Stage, int]) -> None:
    """Write each size to where it is read. Under one name for all, that is training's."""
    for stage in stages:
        own = any(name.startswith(f"{stage}_") for name in places.names_for(stage))
        if own or stage == "train" or len(stages) == 1:
            places.write(stage, found[stage], for_loggers=True)


def forget_fit_loaders(trainer: Trainer) -> None:
    """Have training and validation ask for their loaders anew."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        forget_loaders(loop)


def renew_fit_loaders(trainer: Trainer) -> None:
    """The same in the middle of training, whose loaders have to be there at once."""
    has_loaders = bool(prepared_loaders(trainer.fit_loop))
    forget_fit_loaders(trainer)
    numbers = RandomState.now()
    if has_loaders:
        trainer.fit_loop.setup_data()
        for loader in prepared_loaders(trainer.fit_loop):
            _set_epoch(loader, trainer.current_epoch)
    numbers.restore()


def _set_epoch(loader: Any, epoch: int) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
