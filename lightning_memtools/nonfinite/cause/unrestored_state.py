"""Finds the state of a step that a rerun cannot put back: iterators, files, caches and globals."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator
from io import IOBase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_memtools.nonfinite.tensor_names import plain_name
from lightning_memtools.state.random_state import generator_state

_MOST = 5  # of them, how many are named
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "lightning_memtools.")


def state_not_restored(module: Module) -> list[str]:
    """Return the names of what a step may have read and changed, and that a rerun begins with as the step left it.

    These are the iterators, files, random generators, containers and tensors among the attributes of modules that the
    user wrote, and among the globals that their methods name. The walk does not enter containers.
    """
    found = list(_in_attributes(module))
    for kind in dict.fromkeys(type(part) for part in module.modules()):
        found += _in_globals(kind)
    found = list(dict.fromkeys(found))
    return [*found[:_MOST], *([f"{len(found) - _MOST} more"] if len(found) > _MOST else [])]


def _in_attributes(module: Module) -> Iterator[str]:
    known = vars(Module())
    for name, part in module.named_modules():
        if _is_library(type(part)):
            continue
        for key, value in vars(part).items():
            # Lightning keeps containers under private names, but neither iterators nor files.
            # The module's own random generators are put back.
            if key in known or generator_state(value) is not None:
                continue
            if what := _changeable(value, containers=not key.startswith("_")):
                yield f"attribute {plain_name(name)}.{key} ({what})" if name else f"attribute {key} ({what})"


def _in_globals(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        if _is_library(owner):
            continue
        for function in vars(owner).values():
            if not isinstance(function, types.FunctionType):
                continue
            for name in function.__code__.co_names:
                what = _changeable(function.__globals__.get(name), containers=True)
                if what:
                    yield f"global {name} ({what})"


def _is_library(kind: type) -> bool:
    return kind.__module__.startswith(_LIBRARIES) or kind.__module__ in {"builtins", "torch", "abc", "typing"}


def _changeable(value: Any, *, containers: bool) -> str:
    """Return the kind of a value that a step can change without a trace; empty for others."""
    if isinstance(value, (torch.Generator, random.Random)) or type(value).__name__ in {"Generator", "RandomState"}:
        return "a random generator"
    if isinstance(value, IOBase):
        return "a file"
    if isinstance(value, (list, dict, set, deque)):
        return f"a {type(value).__name__}" if containers and value else ""
    if isinstance(value, Tensor):
        return "a tensor" if containers else ""
    if not isinstance(value, (Module, type)) and hasattr(type(value), "__next__"):
        return "an iterator"
    return ""
