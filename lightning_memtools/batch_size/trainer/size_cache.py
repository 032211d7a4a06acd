"""Found sizes in a JSON file, by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer

from lightning_memtools import __version__
from lightning_memtools._lightning import loop_of, source_of
from lightning_memtools.batch_size.trainer.trial_isolation import takes_part
from lightning_memtools.memory.peaks import STAGES, Stage
from lightning_memtools.memory.stats import MemoryReader


class SizeCache:
    """The sizes in a file that belong to one model, data, device and set of versions. Without a file it is empty.

    Args:
        path: The file; None for none.
        facts: Everything that the sizes depend on.
        writes: False on ranks that do not write.
    """

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
        """Returns the cache for a Trainer.

        Args:
            file: The file's path; None for none.
            trainer: With its model, data and callbacks.
            reader: Reads the device's memory.
            arguments: The tuner's arguments that a size depends on.
            names: The hyperparameters that hold the batch size, on which no size depends.
        """
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
            "data": [_data_facts(source_of(loop_of(trainer, stage)).instance) for stage in STAGES],
            "device": None if reader is None else [reader.name, reader.stats().capacity],
            "ranks": trainer.world_size,
            "precision": str(trainer.precision),
            "accumulate": trainer.accumulate_grad_batches,
            "versions": {"torch": str(torch.__version__), "lightning": lightning.__version__, "memtools": __version__},
            **arguments,
        }
        return cls(Path(file), facts, writes=trainer.is_global_zero)

    def load(self) -> dict[Stage, int]:
        """Returns the sizes that were found under the same facts."""
        sizes = None if self._path is None else load_sizes(self._path, self._key)
        return {stage: sizes[stage] for stage in STAGES if stage in sizes} if sizes else {}

    def store(self, sizes: Mapping[Stage, int]) -> None:
        """Write the sizes. Does nothing on ranks above 0; a file that cannot be written gives a warning."""
        if self._path is None or not self._writes:
            return
        try:
            store_sizes(self._path, self._key, {str(stage): size for stage, size in sizes.items()}, self._facts)
        except OSError as error:
            warnings.warn(f"The batch sizes could not be stored in {self._path}: {error}.", stacklevel=2)


def key_of(facts: Mapping[str, Any]) -> str:
    """Returns a digest of everything that a size depends on; values that JSON cannot express go by their repr."""
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def load_sizes(path: Path, key: str) -> dict[str, int] | None:
    """Returns the sizes found under a key; None where there are none, or the file is not a cache of sizes."""
    entry = _entries(path).get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("sizes"), dict):
        return None
    return {str(stage): int(size) for stage, size in entry["sizes"].items()}


def store_sizes(path: Path, key: str, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """Add or replace an entry. The facts are written too, for people who read the file.

    Raises:
        OSError: The file cannot be written.
    """
    entries = _entries(path)
    entries[key] = {"sizes": dict(sizes), "facts": json.loads(json.dumps(facts, default=repr))}
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is replaced as a whole, because another run may read it at the same time.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=2)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _entries(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _data_facts(instance: Any) -> Any:
    """Returns the type, length and shapes of the data set of passed loaders; of a module the name of its class."""
    dataset = getattr(instance, "dataset", None)
    if dataset is None:
        return [type(instance).__qualname__]
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return [type(dataset).__qualname__, length, [list(t.shape) for t in getattr(dataset, "tensors", ())]]
