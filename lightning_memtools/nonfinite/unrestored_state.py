"""Finds the state that a step reads and that a rerun cannot put back: iterators, files, caches, globals.

A step that was bad and is finite when it is run again has read something that differs, unless the hardware failed. So
what a step reads besides weights, buffers and batches is compared, by digests, with how it was when training began.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import IOBase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools._torch import has_readable_values
from lightning_memtools.memory.fingerprints import fingerprint
from lightning_memtools.memory.leaks.holders import content_of
from lightning_memtools.memory.nested_tensors import attributes_of, plain_name
from lightning_memtools.memory.reachable_variables import names_in, variables_named_by
from lightning_memtools.memory.user_code import owner_of
from lightning_memtools.state.random_state import generator_state

_MOST_PARTS = 2000  # of a container, how many are compared
_MOST_BYTES = 2**22
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "lightning_memtools.")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, Module, Optimizer)
_KINDS: tuple[tuple[Any, str], ...] = (
    ((torch.Generator, random.Random), "a random generator"), (IOBase, "a file"), (Tensor, "a tensor"),
    ((list, tuple, dict, set, deque), "a {}"), (_PLAIN, "a value"),
)  # fmt: skip
_NOT_IN_A_STEP = {
    "__init__", "__new__", "setup", "prepare_data", "configure_model", "configure_optimizers", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader", "validation_step", "test_step", "predict_step",
}  # fmt: skip
_OUTSIDE = {
    "time": "the clock", "datetime": "the clock", "secrets": "the system's random numbers",
    "uuid": "the system's random numbers", "socket": "a connection", "requests": "a connection",
}  # fmt: skip


@dataclass(slots=True)
class _Held:
    """A value that a step may read: its kind, and a digest of its contents; None where they cannot be compared."""

    kind: str
    digest: int | None


class OutsideState:
    """Knows the state outside of weights, buffers and batches that a step may read, as it was when this was made.

    It looks at the attributes of modules that the user wrote, and at the globals, closures and files that their methods
    and the functions of the user that these call name. It is read once, and of what holds much only its name is noted.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._began: dict[str, int | None] = {}
        # Users' objects may refuse anything, and nothing that is looked at where all is well may end a run.
        with contextlib.suppress(Exception):
            self._began = {name: held.digest for name, held in _held_by(module)}

    def changed(self, restored: Collection[str] = ()) -> list[str]:
        """Return the names of what has changed since, or cannot be compared.

        Args:
            restored: The names of attributes that are put back, which do not count.
        """
        changed, unsure = [], []
        for name, held in _held_by(self._module):
            if name.removeprefix("attribute ") in restored:
                continue
            if held.digest is None:
                unsure.append(f"{name} ({held.kind})")
            elif self._began.get(name) != held.digest:
                changed.append(f"{name} ({held.kind})")
        return list(dict.fromkeys([*changed, *unsure]))


def _held_by(module: Module) -> Iterator[tuple[str, _Held]]:
    for name, part in module.named_modules():
        if not _is_library(type(part)):
            prefix = f"attribute {plain_name(name)}." if name else "attribute "
            yield from _in_items(prefix, vars(part), skip=_names_of_libraries(type(part)))
    seen: set[int] = set()
    owners = dict.fromkeys(owner for part in module.modules() for owner in type(part).__mro__)
    for owner in owners:
        if not _is_library(owner):
            # Methods are read below.
            items = {key: value for key, value in vars(owner).items() if not isinstance(value, types.FunctionType)}
            yield from _in_items(f"class attribute {owner.__name__}.", items, skip=())
            for key, value in vars(owner).items():
                if key not in _NOT_IN_A_STEP:
                    yield from _read_by(_function_in(value), seen)


def _in_items(prefix: str, items: Mapping[str, Any], skip: Collection[str]) -> Iterator[tuple[str, _Held]]:
    for key, value in items.items():
        # Attributes of simple types and the module's own random generators are put back.
        if key in skip or key.startswith("__") or isinstance(value, _PLAIN) or generator_state(value) is not None:
            continue
        if (held := _held(value)) is not None:
            yield prefix + key, held


def _names_of_libraries(kind: type) -> Collection[str]:
    """Return the attributes that torch and Lightning themselves give to a module."""
    made = next((base() for base in kind.__mro__ if base.__name__ == "LightningModule" and _is_library(base)), Module())
    return vars(made)


def _function_in(value: Any) -> types.FunctionType | None:
    for name in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, name, None) or value
    return value if isinstance(value, types.FunctionType) else None


def _read_by(function: types.FunctionType | None, seen: set[int]) -> Iterator[tuple[str, _Held]]:
    """Yield what a function of the user reads of its surroundings, and the functions of the user that it calls."""
    if function is None or id(function) in seen or owner_of(function.__code__.co_filename) != "user":
        return
    seen.add(id(function))
    names = names_in(function.__code__)
    for name, value in _surroundings(function, names).items():
        if (source := _source_of(value)) in _OUTSIDE:
            yield name, _Held(_OUTSIDE[source], None)
        elif isinstance(value, types.FunctionType):
            yield from _read_by(value, seen)
        elif (held := _held(value)) is not None:
            yield name, held
    if "open" in names and "open" not in function.__globals__:
        yield f"{function.__name__} calls open", _Held("a file", None)


def _surroundings(function: types.FunctionType, names: Collection[str]) -> dict[str, Any]:
    """Return the globals, closures and values of the user's own modules that a function names."""
    reached = variables_named_by(function)
    found = {f"{'global' if each.is_global else 'variable'} {each.name}": each.value for each in reached}
    for name, value in list(found.items()):
        if isinstance(value, types.ModuleType) and owner_of(getattr(value, "__file__", None) or "<") == "user":
            found.update({f"{name}.{key}": each for key, each in vars(value).items() if key in names})
    return found


def _source_of(value: Any) -> str:
    """Return the name of a module, or of that of a function or class; else ""."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return str(value.__module__) if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else ""


def _is_library(kind: type) -> bool:
    return kind.__module__.startswith(_LIBRARIES) or kind.__module__ in {"builtins", "torch", "abc", "_abc", "typing"}


def _held(value: Any) -> _Held | None:
    """Return a value's kind and digest; None for one that a step cannot change."""
    kind = next((text for kinds, text in _KINDS if isinstance(value, kinds)), "")
    if not kind and hasattr(type(value), "__next__"):
        kind = "an iterator"
    elif not kind and (isinstance(value, _BY_IDENTITY) or _is_library(type(value))):
        has_variables = isinstance(value, types.FunctionType) and value.__closure__
        kind = "a function with variables of its own" if has_variables else ""
    elif not kind:
        kind = "an object of {}"
    if not kind:
        return None
    held = _Held(kind.format(type(value).__name__), None)
    with contextlib.suppress(Exception):
        held.digest = _digest(value)
    return held


def _digest(value: Any) -> int | None:
    """Return a number for the contents of a value; None where it has too many or hides them."""
    parts, waiting = list[Any](), [value]
    seen: dict[int, Any] = {}  # what it holds is alive, so that no id is given twice
    while waiting:
        one = waiting.pop()
        parts.append(type(one))
        if id(one) in seen and not isinstance(one, _PLAIN):
            continue
        seen[id(one)] = one
        found = _part(one)
        if found is None or len(found[1]) + len(parts) > _MOST_PARTS:
            return None
        parts.append(found[0])
        waiting += found[1]
    return hash(tuple(parts))


def _part(value: Any) -> tuple[Any, list[Any]] | None:  # noqa: PLR0911, one return for each kind of value
    """Return what a value is without the values within it, and those; None where that cannot be seen or is large."""
    if isinstance(value, _PLAIN):
        return value if isinstance(value, (str, bytes)) else repr(value), []
    if isinstance(value, types.MethodType):
        return "", [value.__func__, value.__self__]
    if isinstance(value, _BY_IDENTITY):
        cells = value.__closure__ or () if isinstance(value, types.FunctionType) else ()
        return id(value), list(map(content_of, cells))
    if isinstance(value, Tensor):
        is_small = has_readable_values(value) and value.numel() * value.element_size() <= _MOST_BYTES
        return ((tuple(value.shape), int(fingerprint(value))), []) if is_small else None
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return (value.tobytes(), []) if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, (set, frozenset)):
        return (hash(frozenset(value)), []) if len(value) <= _MOST_PARTS else None  # their order says nothing
    inner = _inner(value)
    return None if inner is None else ("", inner)


def _inner(value: Any) -> list[Any] | None:
    """Return the parts of a value, in an order that stays; None where they cannot be seen.

    No code of the user's runs: a mapping may load a data set when its items are asked for.
    """
    if hasattr(type(value), "cache_info"):
        return [value.cache_info().currsize]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.items()]
    if isinstance(value, IOBase) or hasattr(type(value), "__next__") or generator_state(value) is not None:
        return None
    attributes = [part for item in attributes_of(value).items() for part in item]
    if isinstance(value, dict):
        return [*attributes, *(part for item in dict.items(value) for part in item)]
    kind: Any = next((each for each in (list, tuple, deque) if isinstance(value, each)), None)
    if kind is not None:
        return [*attributes, *kind.__iter__(value)]
    return attributes if hasattr(value, "__dict__") or attributes else None
