"""Tensors in nested containers: batches as users build them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def map_tensors(thing: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of the nesting with every tensor replaced by ``change(tensor)``; what holds no tensor is kept as it is.

    Looks into dictionaries and everything like them (also transformers' BatchEncoding), lists, tuples, named tuples
    and dataclasses.
    """
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if next(tensors_of(thing), None) is None:
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
    if isinstance(thing, (list, tuple)):
        return type(thing)(map_tensors(item, change) for item in thing)
    new = copy(thing)
    for field in fields(thing):
        object.__setattr__(new, field.name, map_tensors(getattr(thing, field.name), change))
    return new


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors that `map_tensors` finds, in its order."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors_of(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_of(value)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_of(getattr(thing, field.name))
