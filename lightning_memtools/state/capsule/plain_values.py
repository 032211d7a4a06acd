"""Turns nested values into what `torch.load(weights_only=True)` accepts: tensors, numbers, texts, lists and dicts."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import is_in_memory

_ATOMS = (bool, int, float, str, type(None))
_KIND = "_kind"  # a dictionary of ours; those of users become lists of pairs
CONTAINERS: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, tuple, set, frozenset)
"""Containers that are saved by their items, as are their subclasses."""


class LeftOut:
    """Stands for a value that a capsule cannot hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name} was left out>"


def to_plain(value: Any, left_out: list[str], name: str) -> Any:  # noqa: PLR0911, one kind of value each
    """Return tensors, arrays, numbers, texts, containers, dataclasses and named tuples as plain data.

    Any other value is replaced by a note and named in `left_out`.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor) and _can_be_saved(value):
        return compact(value)
    if isinstance(value, bytes):
        return {_KIND: "bytes", "tensor": torch.tensor(list(value), dtype=torch.uint8)}
    if isinstance(value, np.generic):
        return to_plain(value.item(), left_out, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {_KIND: "array", "tensor": torch.from_numpy(np.ascontiguousarray(value).copy())}
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return {_KIND: kind.__name__, "text": list(value) if isinstance(value, torch.Size) else str(value)}
    path = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, dict) or _is_of_transformers(kind):
        pairs = [[to_plain(k, left_out, name), to_plain(v, left_out, f"{name}[{k!r}]")] for k, v in value.items()]
        return {_KIND: "mapping", "class": path, "pairs": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_plain(item, left_out, f"{name}[{i}]") for i, item in enumerate(value)]
        return {_KIND: "sequence", "class": path, "items": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        fields = {key: to_plain(item, left_out, f"{name}.{key}") for key, item in held.items()}
        return {_KIND: "dataclass", "class": path, "fields": fields}
    left_out.append(f"{name} (a {kind.__qualname__})")
    return {_KIND: "left out", "name": f"{name}, a {kind.__qualname__},"}


def from_plain(value: Any, find: Callable[[str], Any]) -> Any:
    """Return the value that `to_plain` was given.

    Raises:
        ImportError, AttributeError: A class in it cannot be found.
        TypeError: A class may not be in a capsule. Constructors are called only for mappings of transformers.
    """
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind in _READERS:
        return _READERS[kind](value)
    made: Any = find(value["class"])
    if not isinstance(made, type) or hasattr(made, "__del__"):
        raise TypeError(f"{value['class']} is no class whose objects a capsule may hold")
    if kind == "mapping":
        return _mapping(made, {from_plain(k, find): from_plain(v, find) for k, v in value["pairs"]})
    if kind == "sequence":
        return _sequence(made, [from_plain(item, find) for item in value["items"]])
    if kind == "dataclass":
        return _dataclass(made, {key: from_plain(item, find) for key, item in value["fields"].items()})
    raise TypeError(f"{kind!r} is no kind of value that a capsule may hold")


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array": lambda value: value["tensor"].numpy(),
    "bytes": lambda value: bytes(value["tensor"].tolist()),
    "dtype": lambda value: dtype_named(value["text"].removeprefix("torch.")),
    "device": lambda value: torch.device(value["text"]),
    "Size": lambda value: torch.Size(value["text"]),
    "left out": lambda value: LeftOut(value["name"]),
}
"""Read the kinds that name no class."""


def _mapping(made: type, held: dict[Any, Any]) -> Any:
    if _is_of_transformers(made):
        return made(held)
    new, base = _new(made, CONTAINERS[:3])
    for key, item in held.items():
        base.__setitem__(new, key, item)
    return new


def _sequence(made: type, items: list[Any]) -> Any:
    if issubclass(made, (tuple, frozenset)):
        if len(getattr(made, "_fields", items)) != len(items):
            raise TypeError(f"{made.__module__}:{made.__qualname__} has not {len(items)} fields")
        return _new(made, (tuple, frozenset), items)[0]
    new, base = _new(made, (list, set))
    (base.extend if base is list else base.update)(new, items)
    return new


def _new(made: type, bases: tuple[type, ...], *items: Any) -> tuple[Any, Any]:
    """Make an object by the `__new__` of its base container, as a file could choose any constructor; return both."""
    base: Any = next((each for each in bases if issubclass(made, each)), None)
    if base is None:
        raise TypeError(f"{made.__module__}:{made.__qualname__} is no container that a capsule may hold")
    return base.__new__(made, *items), base


def _dataclass(made: type, fields: dict[str, Any]) -> Any:
    names = {each.name for each in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    if not fields.keys() <= names:
        raise TypeError(f"{made.__module__}:{made.__qualname__} is no dataclass with these fields")
    new: Any = object.__new__(made)
    for key, item in fields.items():
        object.__setattr__(new, key, item)
    return new


def _is_of_transformers(kind: type) -> bool:
    """Return whether a class is a mapping of transformers, such as BatchEncoding, which is no dict."""
    return kind.__module__.startswith("transformers.") and issubclass(kind, Mapping)


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
    """Return the bytes that the tensors in plain data take."""
    if isinstance(plain, Tensor):
        is_strided = plain.layout == torch.strided
        return plain.untyped_storage().nbytes() if is_strided else plain.element_size() * plain.numel()
    items = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ()
    return sum(map(n_bytes_of, items))
