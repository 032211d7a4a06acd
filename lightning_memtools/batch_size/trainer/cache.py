"""What a found batch size depends on, read off a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer

from lightning_memtools import __version__
from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.batch_size.cache import key_of, load_sizes, store_sizes
from lightning_memtools.batch_size.trainer.presence import takes_part
from lightning_memtools.memory.stages import Stage
from lightning_memtools.memory.stats import MemoryReader


class SizeCache:
    """A file of sizes, seen from one model, data, device and set of versions. Without a file it knows nothing."""

    def __init__(self, path: Path | None, facts: Mapping[str, Any], *, writes: bool) -> None:
        self._path = path
        self._facts = facts
        self._key = key_of(facts)
        self._writes = writes

    @classmethod
    def of(
        cls,
        file: str | None,
        trainer: Trainer,
        reader: MemoryReader | None,
        arguments: Mapping[str, Any],
        names: Sequence[str],
    ) -> SizeCache:
        """Read the facts, unless there is no file to look them up in."""
        if file is None:
            return cls(None, {}, writes=False)
        model = trainer.lightning_module
        hparams = {key: value for key, value in dict(getattr(model, "hparams", None) or {}).items() if key not in names}
        facts = {
            "model": repr(model),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "parameters": [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()],
            "hparams": {str(key): repr(value) for key, value in hparams.items()},
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
            "callbacks": [type(c).__name__ for c in trainer.callbacks if takes_part(c)],  # type: ignore[attr-defined]
            "data": [_data_of(source_of(loop_of(trainer, stage)).instance) for stage in _STAGES],
            "device": None if reader is None else [reader.name, reader.stats().capacity],
            "ranks": trainer.world_size,
            "precision": str(trainer.precision),
            "accumulate": trainer.accumulate_grad_batches,
            "versions": {"torch": str(torch.__version__), "lightning": lightning.__version__, "memtools": __version__},
            **arguments,
        }
        return cls(Path(file), facts, writes=trainer.is_global_zero)

    def load(self) -> dict[Stage, int]:
        """The sizes that were found under the same facts."""
        sizes = None if self._path is None else load_sizes(self._path, self._key)
        return {stage: sizes[stage] for stage in _STAGES if stage in sizes} if sizes else {}

    def store(self, sizes: Mapping[Stage, int]) -> None:
        """Keep what was found. Rank 0 only; a file that cannot be written gives a warning."""
        if self._path is None or not self._writes:
            return
        try:
            store_sizes(self._path, self._key, {str(stage): size for stage, size in sizes.items()}, self._facts)
        except OSError as error:
            warnings.warn(f"The batch sizes could not be kept in {self._path}: {error}.", stacklevel=2)


_STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")


def _data_of(instance: Any) -> Any:
    """The data set of passed loaders, by type, length and first sample; of a module its class and hyperparameters."""
    dataset = getattr(instance, "dataset", None)
    if dataset is None:
        return [type(instance).__qualname__]
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return [type(dataset).__qualname__, length, [list(t.shape) for t in getattr(dataset, "tensors", ())]]
