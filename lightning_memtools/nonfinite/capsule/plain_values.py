"""Turns nested values into what `torch.load(weights_only=True)` accepts: tensors, numbers, texts, lists and dicts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
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


def from_plain(value: Any, find: Callable[[str], Any]) -> Any:  # noqa: C901, PLR0911, as above
    """Return the value that `to_plain` was given.

    Args:
        value: What `to_plain` returned.
        find: Finds a class by ``"module:name"``.

    Raises:
        ImportError, AttributeError: A class in it cannot be found.
    """
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "array":
        return value["tensor"].numpy()
    if kind == "bytes":
        return bytes(value["tensor"].tolist())
    if kind == "dtype":
        return getattr(torch, value["text"].removeprefix("torch."))
    if kind == "device":
        return torch.device(value["text"])
    if kind == "Size":
        return torch.Size(value["text"])
    if kind == "left out":
        return LeftOut(value["name"])
    made: Any = find(value["class"])
    if kind == "mapping":
        held = {from_plain(k, find): from_plain(v, find) for k, v in value["pairs"]}
        return held if issubclass(made, defaultdict) else made(held)
    if kind == "dataclass":
        new = object.__new__(made)
        for key, item in value["fields"].items():
            object.__setattr__(new, key, from_plain(item, find))
        return new
    items = [from_plain(item, find) for item in value["items"]]
    return made(*items) if kind == "named tuple" else made(items)


def _can_be_saved(tensor: Tensor) -> bool:
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        return False
    return is_in_memory(tensor) or tensor.layout in {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}


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
