"""The variables of a failed step that hold tensors, read off its stack: these belong to no module."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_memtools.memory.error_frames import variables_of
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import OnDevice, bytes_on_device
from lightning_memtools.memory.user_code import LIGHTNING_PACKAGES, owner_of, short_path


class StepVariable(NamedTuple):
    """A variable with the place of its function, "`scores` in assign (model.py:33)", and the tensors that it holds."""

    where: str
    tensors: str
    n_bytes: int


def variables_of_step(on_device: OnDevice, seen: set[int]) -> list[StepVariable]:
    """Return the variables of the user's functions that Lightning has called, each storage once, the largest first.

    Args:
        on_device: Tells which tensors count.
        seen: The identities of storages that are left out.
    """
    found = []
    frame = inspect.currentframe()
    while frame is not None and LIGHTNING_PACKAGES.isdisjoint(Path(file := frame.f_code.co_filename).parts):
        inner, frame = frame, frame.f_back
        if owner_of(file) != "user":
            continue
        place = f"{inner.f_code.co_name} ({short_path(file)}:{inner.f_lineno})"
        for variable, value in variables_of(inner).items():
            tensors = [*tensors_in(value)] if isinstance(value, (Tensor, list, tuple, dict)) else []
            sizes = [(tensor, bytes_on_device([tensor], on_device, seen)) for tensor in tensors]
            new = [tensor for tensor, n_bytes in sizes if n_bytes]
            if new:
                number = f"{len(new)} tensors, " if len(new) > 1 else ""
                shape = f"{number}{str(new[0].dtype).removeprefix('torch.')} {list(new[0].shape)}"
                found.append(StepVariable(f"`{variable}` in {place}", shape, sum(n_bytes for _, n_bytes in sizes)))
    return sorted(found, key=lambda one: -one.n_bytes)
