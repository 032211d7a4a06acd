"""The files that a script writes in a dry run: existing files stay, and large tensors take no disk space."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Larger tensors of the device are written as one zero each: their values are zeros anyway.
_LARGEST_WHOLE_TENSOR = 2**24


class ScriptFiles:
    """Makes the script save a file in the dry run's folder if it would otherwise overwrite an existing file.

    Args:
        directory: The folder of the dry run.
        note: Called with a remark for the user about each file that the script writes.
    """

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        self._directory = directory.resolve()
        self._note = note
        self._moved: dict[Path, Path] = {}
        self._new: set[Path] = set()

    def to_write(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return `path` or, if the user already has a file there, a path in the dry run's folder to write to."""
        given = Path(path).resolve()
        if given.is_relative_to(self._directory) or given in self._new:
            return path
        if given.exists():
            target = self._moved.setdefault(given, self._directory / "saved" / given.relative_to(given.anchor))
            target.parent.mkdir(parents=True, exist_ok=True)
            self._note(f"{path} was there before and is untouched; the script's was written to {target}.")
            return target
        self._new.add(given)
        self._note(f"The script wrote {path}: what it holds of the device is zeros.")
        return path

    def to_read(self, file: Any) -> Any:
        """Return the path to read instead of `file`, if writing to `file` was redirected. Otherwise, return `file`."""
        path = getattr(file, "name", file)  # Lightning opens files itself
        return self._moved.get(Path(path).resolve(), file) if isinstance(path, (str, os.PathLike)) else file

    def guard_torch(self) -> None:
        """Patch `torch.save` and `torch.load` so that they use the redirected path of a file."""
        save, load = torch.save, torch.load

        @functools.wraps(save)
        def guarded_save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            is_path = isinstance(f, (str, os.PathLike))
            save(_changed(obj, _shrunk), self.to_write(f) if is_path else f, *args, **options)

        @functools.wraps(load)
        def guarded_load(f: Any, *args: Any, **options: Any) -> Any:
            return _changed(load(self.to_read(f), *args, **options), _filled)

        torch.save, torch.load = guarded_save, guarded_load

    def guard_fabric(self, package: Any) -> None:
        """Patch `Fabric.save`, which opens files itself, so that it does not overwrite the user's files."""
        original = package.Fabric.save

        @functools.wraps(original)
        def save(fabric: Any, path: Any, *args: Any, **options: Any) -> Any:
            return original(fabric, self.to_write(path), *args, **options)

        package.Fabric.save = save


def _changed(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested dicts, lists and tuples, with `change` applied to each Tensor, except subclasses."""
    if type(thing) is Tensor:
        return change(thing)
    if isinstance(thing, dict):
        # A copy keeps what state dicts carry beside their entries: the versions of modules.
        made = copy.copy(thing)
        made.update({key: _changed(value, change) for key, value in thing.items()})
        return made
    if type(thing) in {list, tuple}:
        return type(thing)(_changed(one, change) for one in thing)
    return thing


def _shrunk(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or tensor.nbytes <= _LARGEST_WHOLE_TENSOR:
        return tensor
    return torch.zeros(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _filled(tensor: Tensor) -> Tensor:
    """Expand a loaded CUDA tensor if it is large, because it was saved as a single zero. Return others unchanged."""
    return tensor.contiguous() if tensor.is_cuda and tensor.nbytes > _LARGEST_WHOLE_TENSOR else tensor
