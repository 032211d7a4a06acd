"""The variables of a failed step that hold tensors, read off its stack: these belong to no module."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch import Tensor

from lightning_memtools.memory.error_frames import variables_of
from lightning_memtools.memory.nested_tensors import named_tensors
from lightning_memtools.memory.owned import OnDevice, block_bytes, storage_of
from lightning_memtools.memory.user_code import LIGHTNING_PACKAGES, owner_of, short_path


class StepVariable(NamedTuple):
    """A variable with the place of its function, "`scores` in assign (model.py:33)", and the tensor that it holds."""

    where: str
    tensor: str
    n_bytes: int


def variables_of_step(error: BaseException | None, on_device: OnDevice, seen: set[int]) -> list[StepVariable]:
    """Return the variables of the user's functions that Lightning had called, each storage once, the largest first.

    Args:
        error: The error whose traceback is read; None for the functions that run now.
        on_device: Tells which tensors count.
        seen: The identities of storages that are left out.
    """
    found = []
    for frame in _frames(error):
        file = frame.f_code.co_filename
        if not LIGHTNING_PACKAGES.isdisjoint(Path(file).parts):
            break
        if owner_of(file) != "user":
            continue
        place = f"{frame.f_code.co_name} ({short_path(file)}:{frame.f_lineno})"
        for variable, value in variables_of(frame).items():
            held = named_tensors(value, variable) if isinstance(value, (Tensor, list, tuple, dict)) else ()
            for name, tensor in held:
                storage = storage_of(tensor) if on_device(tensor) else None
                if storage is not None and storage[0] not in seen:
                    seen.add(storage[0])
                    shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                    found.append(StepVariable(f"`{name}` in {place}", shape, block_bytes(storage[1])))
    return sorted(found, key=lambda one: -one.n_bytes)


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield frames, the innermost first."""
    if error is not None:
        yield from reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        return
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
