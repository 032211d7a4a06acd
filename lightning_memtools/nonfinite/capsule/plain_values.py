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


class LeftOut:
    """Stands for a value that a capsule cannot hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name} was left out>"


def to_plain(value: Any, left_out: list[str], name: str) -> Any:  # noqa: PLR0911, one kind of value each
    """Return the value as plain data. Values that cannot be saved are replaced by a note and named in `left_out`."""
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
    if isinstance(value, Mapping):
        pairs = [[to_plain(k, left_out, name), to_plain(v, left_out, f"{name}[{k!r}]")] for k, v in value.items()]
        return {_KIND: "mapping", "class": _path(type(value)), "pairs": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_plain(item, left_out, f"{name}[{i}]") for i, item in enumerate(value)]
        kind = "named tuple" if hasattr(value, "_fields") else "sequence"
        return {_KIND: kind, "class": _path(type(value)), "items": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {key: to_plain(item, left_out, f"{name}.{key}") for key, item in held.items()}
        return {_KIND: "dataclass", "class": _path(type(value)), "fields": fields}
    return _leave_out(value, left_out, name)


def from_plain(value: Any, find: Callable[[str], Any]) -> Any:  # noqa: C901, PLR0911, PLR0912, as above
    """Return the value that `to_plain` was given.

    Args:
        value: What `to_plain` returned.
        find: Finds a class by ``"module:name"``.

    Raises:
        ImportError, AttributeError: A class in it cannot be found.
        TypeError: A class is none that may be in a capsule. No constructor or function that it names is called.
    """
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "array":
        return value["tensor"].numpy()
    if kind == "bytes":
        return bytes(value["tensor"].tolist())
    if kind == "dtype":
        return dtype_named(value["text"].removeprefix("torch."))
    if kind == "device":
        return torch.device(value["text"])
    if kind == "Size":
        return torch.Size(value["text"])
    if kind == "left out":
        return LeftOut(value["name"])
    made: Any = find(value["class"])
    if not isinstance(made, type):
        raise TypeError(f"{value['class']} is no class")
    if kind == "mapping":
        held = {from_plain(k, find): from_plain(v, find) for k, v in value["pairs"]}
        return _mapping(made, held)
    if kind == "dataclass":
        names = {each.name for each in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
        if not value["fields"].keys() <= names or hasattr(made, "__del__"):
            raise TypeError(f"{value['class']} is no dataclass with these fields")
        new: Any = object.__new__(made)
        for key, item in value["fields"].items():
            object.__setattr__(new, key, from_plain(item, find))
        return new
    items = [from_plain(item, find) for item in value["items"]]
    if kind == "named tuple" and issubclass(made, tuple) and len(getattr(made, "_fields", ())) == len(items):
        return tuple.__new__(made, items)  # past a constructor that the capsule could choose
    return _sequence(made, items)


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
    if made.__module__.startswith(("transformers.", "lightning.", "pytorch_lightning.")) and issubclass(made, Mapping):
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
