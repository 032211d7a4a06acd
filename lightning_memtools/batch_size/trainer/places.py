"""Where a batch size is written down."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_memtools._lightning import correct_logged_hparam
from lightning_memtools.memory.stages import STAGES, Stage


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
