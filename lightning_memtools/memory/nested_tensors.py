"""The tensors in nested containers, such as the batches that users build: find them all, or replace them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.optim import Optimizer

_LONG = 1000
_NO_CONTAINERS = (str, bytes, int, float, complex, type, torch.nn.Module)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested containers, dataclasses and plain objects in their order, each object visited once.

    Of a container with more than 1000 items only the first item is visited, unless that one holds a tensor: the
    container may be an index of millions of file names.
    """
    seen: set[int] = set()
    stack = [thing]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        else:
            stack.extend(reversed(tuple(_visited(_contents(one)))))


def _contents(thing: Any) -> Collection[Any]:
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return thing
    # Modules and optimizers may be reached from nearly anywhere, and are no part of a batch or of a dataset.
    if thing is None or callable(thing) or isinstance(thing, (*_NO_CONTAINERS, Optimizer)):
        return ()
    if is_dataclass(thing):
        return [getattr(thing, field.name, None) for field in fields(thing)]
    return vars(thing).values() if hasattr(thing, "__dict__") else ()


def _visited(items: Collection[Any]) -> Collection[Any]:
    if len(items) > _LONG and next(tensors_in(next(iter(items))), None) is None:
        return ()
    return items


def map_tensors(thing: Any, change: Callable[[torch.Tensor], Any]) -> Any:  # noqa: PLR0911, one per kind
    """Return a copy of the nesting with every tensor replaced by ``change(tensor)``.

    It finds the tensors that `tensors_in` finds: in dictionaries and everything like them (also transformers'
    BatchEncoding), lists, tuples, named tuples, sets, dataclasses and plain objects. Parts that hold no tensor are
    not copied.
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
