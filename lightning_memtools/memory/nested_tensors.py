"""Finds, names or replaces all tensors in batches, other nested containers and modules."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from operator import length_hint
from typing import Any

import torch
from torch.optim import Optimizer

_LONG = 1000
_NO_CONTAINERS = (str, bytes, int, float, complex, type, torch.nn.Module)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested containers, dataclasses and plain objects, in order. Each tensor is yielded once.

    A container with more than 1000 items is skipped if its first item holds no tensor. This saves time when the
    container is, for example, a list of millions of file names.
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
            stack.extend(reversed(tuple(iter(_visited(_contents(one))))))


def bytes_in(thing: Any) -> int:
    """Return the total size in bytes of all tensors in nested containers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(thing))


def batch_size_in(batch: Any) -> int | None:
    """Return the size of dimension 0 of the first tensor that is not a scalar; None if there is none."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None)


def _contents(thing: Any) -> Collection[Any]:
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return thing
    if not is_plain_object(thing):
        return ()
    return _held_by(thing).values()


def is_plain_object(thing: Any) -> bool:
    """Return False for modules, functions and the like; True for objects that may hold data, such as custom batches."""
    # Modules and optimizers may be reached from nearly anywhere, and are no part of a batch or of a dataset.
    if thing is None or isinstance(thing, (*_NO_CONTAINERS, Optimizer)):
        return False
    # Graphs of PyTorch Geometric can be called. What can be moved to a device is data, and no function.
    return not callable(thing) or hasattr(type(thing), "to")


def slots_of(thing: Any) -> dict[str, Any]:
    """Return the attributes that an object keeps in `__slots__`, as a dict by name."""
    return {name: getattr(thing, name) for name in slot_names(type(thing)) if hasattr(thing, name)}


def slot_names(kind: type) -> list[str]:
    """Return the names of a class's slots, including inherited ones. Private names (`__x`) are mangled."""
    return [name for base in kind.__mro__ for name in _own_slot_names(base)]


def _own_slot_names(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    names = [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in names]
    return [name for name in names if name not in {"__dict__", "__weakref__"}]


def named_tensors(collection: Any, name: str, _within: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (expression, tensor) for each tensor in `collection`. If `name` is "batch": (``batch["x"][0]``, tensor)."""
    if isinstance(collection, torch.Tensor):
        yield name, collection
    elif all(collection is not outer for outer in _within):
        within = (*_within, collection)
        for inner, value in _named_contents(collection, name):
            if not isinstance(value, (str, int, float, type(None))):
                yield from named_tensors(value, inner, within)


def _named_contents(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        for key, value in thing.items() if _visited(thing.values()) else ():
            yield f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]", value
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        for key in thing._fields:
            yield f"{name}.{key}", getattr(thing, key)
    elif isinstance(thing, (Sequence, set, frozenset, deque)) and not isinstance(thing, (str, bytes)):
        for index, value in enumerate(_visited(thing)):
            yield f"{name}[{index}]", value
    elif is_plain_object(thing):
        yield from _named_attributes(thing, name)


def _named_attributes(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, value in _held_by(thing).items():
        if not key.startswith("_") or not isinstance(value, Mapping):
            yield f"{name}.{key}", value
            continue
        # Tensors in a private dictionary are named as attributes. Others are not asked for: properties may warn.
        for inner, part in value.items():
            is_shown = isinstance(part, torch.Tensor) and getattr(thing, str(inner), None) is part
            yield f"{name}.{inner}" if is_shown else f"{name}.{key}[{inner!r}]", part


def _held_by(thing: Any) -> dict[str, Any]:
    if is_dataclass(thing):
        return {field.name: getattr(thing, field.name, None) for field in fields(thing)}
    return {**slots_of(thing), **getattr(thing, "__dict__", {})}


def _visited(items: Collection[Any]) -> Collection[Any]:
    # Not `len`, which a tuple may refuse (e3nn's Irreps do).
    if length_hint(iter(items)) > _LONG and next(tensors_in(next(iter(items))), None) is None:
        return ()
    return items


def map_tensors(thing: Any, change: Callable[[torch.Tensor], Any]) -> Any:  # noqa: PLR0911, one per kind
    """Return a copy of nested containers with every tensor replaced by ``change(tensor)``.

    The tensors are those that `tensors_in` finds: in dictionaries and other mappings (such as transformers'
    BatchEncoding), lists, tuples, named tuples, sets, dataclasses and plain objects. Parts that hold no tensor are
    not copied.
    """
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if next(tensors_in(thing), None) is None:
        return thing
    if isinstance(thing, (dict, UserDict)):
        new: Any = copy(thing)
        for key, value in thing.items():
            new[key] = map_tensors(value, change)
        return new
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(map_tensors(item, change) for item in thing))
    if isinstance(thing, Mapping) and not hasattr(thing, "__dict__"):
        return {key: map_tensors(value, change) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return type(thing)(map_tensors(item, change) for item in thing)
    new = copy(thing)
    for name in _held_by(thing):
        # Of the copy: its parts may refer to it.
        object.__setattr__(new, name, map_tensors(getattr(new, name), change))
    return new


def in_new_containers(batch: Any) -> Any:
    """Copy a batch's containers but not its tensors. If a step then adds or replaces items, the copy is unaffected."""
    if isinstance(batch, torch.Tensor):
        return batch
    with suppress(Exception):  # an object of the user's may refuse to be copied
        new = map_tensors(batch, lambda tensor: tensor)
        return copy(batch) if new is batch else new
    return batch


# Added to the names by torch.compile and older wrappers.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers such as torch.compile add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> list[str]:
    """Return the model's name for each parameter, or "parameter <index>" for one that the model does not have."""
    known = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(parameters)]


def tensors_in_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for tensors in attributes of a module and its submodules, except parameters and buffers."""
    of_every_module = vars(torch.nn.Module())
    for name, part in model.named_modules():
        prefix = f"{plain_name(name)}." if name else ""
        for key, value in vars(part).items():
            if key not in of_every_module and not key.startswith("_"):
                yield from named_tensors(value, f"{prefix}{key}")
