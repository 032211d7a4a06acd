"""Turns a step into plain values that `torch.load(weights_only=True)` accepts, writes them to a file, and reads it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import is_in_memory
from lightning_memtools.memory.sizes import format_size

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
    """Make an object by its base container's `__new__`, and return both. A file must not choose the constructor."""
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


VERSION = 1
_DROPPABLE = [("optimizers", "optimizer state"), ("weights", "weights and buffers")]


def write_capsule(
    saved: dict[str, Any], path: Path, max_bytes: int, about: Mapping[str, Any], left_out: list[str]
) -> None:
    """Write a step to `path`, and a small JSON file beside it, which tells what is known without loading the step.

    Both appear whole or not at all. If the file would be larger than `max_bytes`, the optimizers' state is left out,
    which a replay of loss and gradients rarely uses; then the weights and buffers; then nothing is written.

    Args:
        saved: The step, as plain values.
        path: The file.
        max_bytes: Its largest size.
        about: The contents of the JSON file.
        left_out: The names of what `saved` does not hold; gets those of the parts that do not fit.

    Raises:
        ValueError: It does not fit even without weights.
        OSError: It cannot be written.
    """
    droppable = [(part, what, n) for part, what in _DROPPABLE if (n := n_bytes_of(saved[part]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    while (n_bytes := _write_if_it_fits(saved, path, max_bytes, {**about, "left_out": left_out})) > max_bytes:
        if not droppable:
            raise ValueError(
                f"without weights it still takes {format_size(n_bytes)}, more than max_bytes ({format_size(max_bytes)})"
            )
        part, what, dropped = droppable.pop(0)
        left_out.append(f"{what} ({format_size(dropped)}, for max_bytes)")
        saved[part] = None


def _write_if_it_fits(saved: dict[str, Any], path: Path, max_bytes: int, about: dict[str, Any]) -> int:
    """Write both files if the capsule is not larger than allowed; return its size in bytes."""
    needed = n_bytes_of(saved)
    if needed > max_bytes:
        return needed  # the tensors alone are too large: do not fill the disk to find out
    about = {"version": VERSION, **about}
    saved |= {"version": VERSION, "left_out": list(about["left_out"]), "about": json.dumps(about)}
    n_bytes = _whole(path, lambda file: torch.save(saved, file), max_bytes)
    if n_bytes <= max_bytes:
        text = json.dumps({**about, "capsule": path.name, "bytes": n_bytes}, indent=2) + "\n"
        try:
            _whole(path.with_suffix(".json"), lambda file: file.write(text.encode()))
        except OSError:
            path.unlink()
            raise
    return n_bytes


def _whole(path: Path, write: Callable[[Any], object], max_bytes: float = math.inf) -> int:
    """Write a file under another name first, so that nobody sees half of it; return its size.

    A file that is too large is deleted.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        n_bytes = unfinished.stat().st_size
        if n_bytes <= max_bytes:
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return n_bytes


class CapsuleError(RuntimeError):
    """Raised when a capsule cannot be read or replayed. It says why, what can still be read, and what to do."""


def read_capsule(path: Path) -> dict[str, Any]:
    """Return what `write_capsule` wrote, with tensors on the CPU.

    Raises:
        CapsuleError: There is no capsule, it is not whole, or it is of another version.
    """
    about = _about_beside(path)
    if not path.is_file():
        raise CapsuleError(f"There is no capsule {path}.{_still_known(about)}")
    try:
        _refuse_what_unpacks_to_more(path)
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size, written = path.stat().st_size, about.get("bytes")
        with path.open("rb") as file:
            begins = file.read(2)
        if not about and begins not in {b"", b"PK"}:
            raise CapsuleError(f"{path} is no capsule of HaltOnNaN: those are zip files.") from error
        if written is not None and size != written:
            why = f"it is truncated: {size} bytes of {written}"
        else:
            why = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise CapsuleError(
            f"{path} cannot be read: {why}.{_still_known(about)}\nNext: copy it once more from where it was written."
        ) from error
    if not isinstance(saved, dict) or "version" not in saved or "about" not in saved:
        raise CapsuleError(f"{path} is no capsule of HaltOnNaN, though torch can load it.")
    if saved["version"] != VERSION:
        about = about or json.loads(saved["about"])
        by = about.get("machine", {}).get("lightning_memtools", "another version")
        raise CapsuleError(
            f"{path} is of capsule version {saved['version']}; this lightning_memtools reads version {VERSION}."
            f"{_still_known(about)}\nNext: install lightning_memtools {by}, which wrote it."
        )
    return saved


def _refuse_what_unpacks_to_more(path: Path) -> None:
    """Raise ValueError for an archive that declares more bytes than it has: torch.save compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(each.file_size for each in archive.infolist())
    # A comment could hold a second directory, which torch might read instead of this.
    if n_bytes > path.stat().st_size or archive.comment:
        raise ValueError(f"it would unpack to {format_size(n_bytes)}, more than its own size")


def _still_known(about: Mapping[str, Any]) -> str:
    """Return the contents of the JSON file, as sentences to add to an error."""
    if not about:
        return " Nothing of it can be read: the small JSON beside it is missing too."
    known = [f"\nStill known: {about.get('headline', '')}"]
    known += [f"{what}: {about[key]}" for key, what in (("cause", "Cause"), ("what", "Operation")) if about.get(key)]
    if about.get("checkpoint"):
        known.append(f"Weights and optimizer state before the step: {about['checkpoint']}")
    return "\n".join(known)


def _about_beside(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
