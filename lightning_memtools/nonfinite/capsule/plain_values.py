"""Turns nested values into what `torch.load(weights_only=True)` accepts: tensors, numbers, texts, lists and dicts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.nested_tensors import attributes_of, is_plain_object, slots_of

_ATOMS = (bool, int, float, str, type(None))
Holders = tuple[Any, ...]


_KIND = "_kind"  # a dictionary of ours; those of users become lists of pairs


class LeftOut:
    """Stands for a value that a capsule cannot hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name} was left out>"


def to_plain(value: Any, left_out: list[str], name: str, within: Holders = ()) -> Any:  # noqa: PLR0911, one kind of value each
    """Return the value as plain data. Values that cannot be saved are replaced by a note and named in `left_out`.

    `within`: the plain objects around it, outermost first.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return compact(value) if _can_be_saved(value) else _leave_out(value, left_out, name)
    if isinstance(value, bytes):
        return {_KIND: "bytes", "tensor": torch.tensor(list(value), dtype=torch.uint8)}
    if isinstance(value, np.generic):
        return to_plain(value.item(), left_out, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {_KIND: "array", "tensor": torch.from_numpy(np.ascontiguousarray(value).copy())}
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return {_KIND: type(value).__name__, "text": list(value) if isinstance(value, torch.Size) else str(value)}
    if isinstance(value, Mapping) and _is_mapping(type(value)):
        pairs = [
            [to_plain(k, left_out, name), to_plain(v, left_out, f"{name}[{k!r}]", within)] for k, v in value.items()
        ]
        return {_KIND: "mapping", "class": _path(type(value)), "pairs": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_plain(item, left_out, f"{name}[{i}]", within) for i, item in enumerate(value)]
        kind = "named tuple" if hasattr(value, "_fields") else "sequence"
        return {_KIND: kind, "class": _path(type(value)), "items": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {key: to_plain(item, left_out, f"{name}.{key}", within) for key, item in held.items()}
        return {_KIND: "dataclass", "class": _path(type(value)), "fields": fields}
    return _object_to_plain(value, left_out, name, within) or _leave_out(value, left_out, name)


def _object_to_plain(value: Any, left_out: list[str], name: str, within: Holders) -> dict[str, Any] | None:
    """Return a plain object by its attributes, or what refers to one around it; None for what cannot be saved."""
    target = value() if isinstance(value, ReferenceType) else value
    around = next((level for level, holder in enumerate(within) if holder is target), None)
    if around is not None:
        return {_KIND: "holder", "level": around, "weak": target is not value}
    if isinstance(value, type):
        is_held = within and _is_related(value, type(within[-1])) and _is_importable(value)
        return {_KIND: "class", "class": _path(value)} if is_held else None
    kind = type(value)
    if not is_plain_object(value) or not _may_be_held(kind) or not (hasattr(value, "__dict__") or slots_of(value)):
        return None
    # PyTorch Geometric makes the class of a batch of graphs from its two bases, without anything of its own.
    bases = [] if _is_importable(kind) else [_path(base) for base in kind.__bases__]
    if bases and (not all(map(_is_importable, kind.__bases__)) or any(map(callable, vars(kind).values()))):
        return None
    inner = (*within, value)
    held = {key: to_plain(each, left_out, f"{name}.{key}", inner) for key, each in attributes_of(value).items()}
    return {_KIND: "object", "class": _path(kind), "bases": bases, "attributes": held}


def from_plain(value: Any, find: Callable[[str], Any], within: Holders = ()) -> Any:  # noqa: C901, PLR0911, one kind each
    """Return the value that `to_plain` was given.

    Args:
        value: What `to_plain` returned.
        find: Finds a class by ``"module:name"``.
        within: The plain objects around it, outermost first.

    Raises:
        ImportError, AttributeError: A class in it cannot be found.
        TypeError: A class is none that may be in a capsule. No constructor or function that it names is called.
    """
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind in _READERS:
        return _READERS[kind](value)
    if kind == "holder":
        return ref(within[value["level"]]) if value["weak"] else within[value["level"]]
    if kind == "object":
        return _object_from_plain(value, find, within)
    made: Any = find(value["class"])
    if not isinstance(made, type):
        raise TypeError(f"{value['class']} is no class")
    if kind == "class":
        if not within or not _is_related(made, type(within[-1])):
            raise TypeError(f"{value['class']} is of another package than the object that holds it")
        return made
    if kind == "mapping":
        return _mapping(made, {from_plain(k, find): from_plain(v, find, within) for k, v in value["pairs"]})
    if kind == "dataclass":
        return _dataclass(made, {key: from_plain(item, find, within) for key, item in value["fields"].items()})
    items = [from_plain(item, find, within) for item in value["items"]]
    if kind == "named tuple" and issubclass(made, tuple) and len(getattr(made, "_fields", ())) == len(items):
        return tuple.__new__(made, items)  # past a constructor that the capsule could choose
    return _sequence(made, items)


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array": lambda value: value["tensor"].numpy(),
    "bytes": lambda value: bytes(value["tensor"].tolist()),
    "dtype": lambda value: dtype_named(value["text"].removeprefix("torch.")),
    "device": lambda value: torch.device(value["text"]),
    "Size": lambda value: torch.Size(value["text"]),
    "left out": lambda value: LeftOut(value["name"]),
}
"""Read the kinds that name no class."""


def _object_from_plain(value: Mapping[str, Any], find: Callable[[str], Any], within: Holders) -> Any:
    """Return a plain object with its attributes; neither its constructor nor another of its methods is called."""
    bases = tuple(map(find, value["bases"]))
    made = find(value["class"]) if not bases else None
    if not all(isinstance(each, type) for each in bases or (made,)):
        raise TypeError(f"{value['class']} is no class")
    made = made or _derived(value["class"].rpartition(":")[2], bases)
    if not _may_be_held(made):
        raise TypeError(f"{value['class']} is no class whose objects a capsule may hold")
    new: Any = made() if made in NAMESPACES else object.__new__(made)
    for key, item in value["attributes"].items():
        held = from_plain(item, find, (*within, new))
        if hasattr(new, "__dict__"):
            new.__dict__[key] = held
        else:
            object.__setattr__(new, key, held)
    return new


def _derived(name: str, bases: tuple[type, ...]) -> type:
    """Return a new class without anything of its own."""
    kinds = tuple(dict.fromkeys(map(type, bases)))
    metaclass = kinds[0] if len(kinds) == 1 else types.new_class("Metaclass", kinds)
    return types.new_class(name, bases, {"metaclass": metaclass})


def _may_be_held(kind: type) -> bool:
    """Return whether objects of a class may be in a capsule by their attributes alone.

    Not those of Python, torch and Lightning, nor what has code that runs when an object is dropped or only looked at.
    """
    if kind in NAMESPACES:
        return True
    own = [each for each in kind.__mro__ if each.__module__ not in _WITHOUT_CODE]
    if not own or issubclass(kind, (torch.nn.Module, dict, list, tuple, set, frozenset)):
        return False
    return not any(_package(each) in _NOT_HELD or {"__del__", "__getattribute__"} & vars(each).keys() for each in own)


NAMESPACES: set[Any] = {types.SimpleNamespace, argparse.Namespace}
_WITHOUT_CODE = {"builtins", "abc", "typing", "collections.abc"}
_NOT_HELD = (sys.stdlib_module_names - {"__main__"}) | {"torch", "lightning", "pytorch_lightning", "lightning_memtools"}


def _is_related(kind: type, to: type) -> bool:
    """Return whether a class is of a package that the other class is made of; Python's own are none."""
    return _package(kind) in {_package(each) for each in to.__mro__} - _NOT_HELD


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def _is_mapping(kind: type) -> bool:
    """Return whether a mapping is saved by its items; others are saved by their attributes."""
    return issubclass(kind, dict) or kind.__module__.startswith(_MAPPINGS_OF)


_MAPPINGS_OF = ("transformers.", "lightning.", "pytorch_lightning.", "collections", "types")


def _dataclass(made: type, fields: dict[str, Any]) -> Any:
    """Return a dataclass's object without running its constructor."""
    names = {each.name for each in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    if not fields.keys() <= names or hasattr(made, "__del__"):
        raise TypeError(f"{made.__module__}:{made.__qualname__} is no dataclass with these fields")
    new: Any = object.__new__(made)
    for key, item in fields.items():
        object.__setattr__(new, key, item)
    return new


def _mapping(made: type, held: dict[Any, Any]) -> Any:
    """Return a mapping of a class without running a constructor that the capsule could choose."""
    if made is dict or issubclass(made, defaultdict):
        return held
    if made is OrderedDict:
        return OrderedDict(held)
    if issubclass(made, dict) and not hasattr(made, "__del__"):
        new: Any = made.__base__.__new__(made) if made.__base__ in {dict, OrderedDict} else None
        if new is not None:
            dict.update(new, held)
            return new
    if made.__module__.startswith(_MAPPINGS_OF[:3]) and issubclass(made, Mapping):
        return made(held)  # type: ignore[call-arg]
    raise TypeError(f"{made.__module__}:{made.__qualname__} is no mapping that a capsule may hold")


def _sequence(made: type, items: list[Any]) -> Any:
    for base in (list, tuple, set, frozenset):
        if made is base:
            return base(items)
    if issubclass(made, (tuple, frozenset)) and not hasattr(made, "__del__"):
        kind: Any = tuple if issubclass(made, tuple) else frozenset
        return kind.__new__(made, items)
    if issubclass(made, (list, set)) and not hasattr(made, "__del__"):
        base = list if issubclass(made, list) else set
        new: Any = base.__new__(made)
        (list.extend if base is list else set.update)(new, items)
        return new
    raise TypeError(f"{made.__module__}:{made.__qualname__} is no sequence that a capsule may hold")


def _can_be_saved(tensor: Tensor) -> bool:
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        return False
    if tensor.is_meta:  # it has no values, and is saved with all that it has
        return True
    return is_in_memory(tensor) or tensor.layout in {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}


def dtype_named(name: str) -> torch.dtype:
    """Return the data type of torch with this name.

    Raises:
        TypeError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no data type")
    return dtype


def compact(tensor: Tensor) -> Tensor:
    """Return the tensor with its strides, without the rest of its storage: files hold whole storages."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.untyped_storage().nbytes() <= extent * tensor.element_size():
        return tensor
    flat = torch.as_strided(tensor, (extent,), (1,), tensor.storage_offset()).clone()
    return torch.as_strided(flat, tensor.shape, tensor.stride())


def n_bytes_of(plain: Any) -> int:
    """Return the bytes that the tensors in it take."""
    if isinstance(plain, Tensor):
        return (
            plain.untyped_storage().nbytes() if plain.layout == torch.strided else plain.element_size() * plain.numel()
        )
    if isinstance(plain, dict):
        return sum(map(n_bytes_of, plain.values()))
    return sum(map(n_bytes_of, plain)) if isinstance(plain, list) else 0


def _leave_out(value: Any, left_out: list[str], name: str) -> dict[str, str]:
    left_out.append(f"{name} (a {type(value).__qualname__})")
    return {_KIND: "left out", "name": f"{name}, a {type(value).__qualname__},"}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
