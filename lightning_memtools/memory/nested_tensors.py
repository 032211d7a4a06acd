"""Tensors in nested containers: batches as users build them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from lightning_memtools.memory.virtual.parts import tensors_in


def map_tensors(thing: Any, change: Callable[[torch.Tensor], Any]) -> Any:  # noqa: PLR0911, one per kind
    """A copy of the nesting with every tensor replaced by ``change(tensor)``; what holds no tensor is kept as it is.

    Looks where `tensors_in` does: into dictionaries and everything like them (also transformers' BatchEncoding), lists,
    tuples, named tuples, sets, dataclasses and plain objects.
    """
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if next(tensors_in(thing), None) is None:
        return thing
    if isinstance(thing, MutableMapping):
        new = copy(thing)
        # A UserDict's copy shares its data.
        if isinstance(getattr(new, "data", None), dict):
            new.data = dict(new.data)  # type: ignore[attr-defined]
        for key in list(thing):
            new[key] = map_tensors(thing[key], change)
        return new
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(map_tensors(item, change) for item in thing))
    if isinstance(thing, Mapping):
        return {key: map_tensors(value, change) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return type(thing)(map_tensors(item, change) for item in thing)
    new = copy(thing)
    names = [field.name for field in fields(thing)] if is_dataclass(thing) else list(vars(thing))
    for name in names:
        object.__setattr__(new, name, map_tensors(getattr(thing, name), change))
    return new
