"""Finds the variables that a module's hooks can change besides what they are given: closures, globals, objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_memtools._torch import hooks_of

# Hooks call functions of the user that call others; further away lies the rest of the program.
_MOST_CALLS = 3
_NO_STATE = (str, bytes, type, ModuleType, Tensor, CellType, list, dict, set, tuple)


@dataclass(frozen=True, slots=True)
class HookVariable:
    """A variable of a closure, or an entry of a dictionary: the global names of a function, an object's attributes.

    Attributes:
        name: Its name.
        holder: The cell of the closure, or the dictionary.
    """

    name: str
    holder: CellType | dict[str, Any]

    @property
    def value(self) -> Any:
        """Its value."""
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder.get(self.name)

    def put(self, value: Any) -> None:
        """Set its value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


def hook_variables(module: nn.Module) -> list[HookVariable]:
    """Returns the variables that the hooks on a module can reach, each once."""
    found: dict[tuple[int, str], HookVariable] = {}
    for hook in hooks_of(module):
        for one in _of(hook, 0):
            found.setdefault((id(one.holder), one.name), one)
    return list(found.values())


def _of(thing: Any, calls: int) -> Iterator[HookVariable]:
    """Yields the variables of a hook, of a function that one calls, or of an object that one refers to."""
    if calls > _MOST_CALLS or isinstance(thing, _NO_STATE) or thing is None:
        return
    if isinstance(thing, partial):
        for one in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _of(one, calls)
    elif isinstance(thing, MethodType):
        yield from _of(thing.__func__, calls)
        # Of a whole model only what the method names: the rest has nothing to do with it.
        names = getattr(thing.__func__, "__code__", None)
        mentioned = None if names is None or not isinstance(thing.__self__, nn.Module) else names.co_names
        yield from _attributes(thing.__self__, mentioned)
    elif isinstance(thing, FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            yield from _variable(HookVariable(name, cell), thing.__code__.co_names, calls)
        for name in thing.__code__.co_names:
            if name in thing.__globals__:
                yield from _variable(HookVariable(name, thing.__globals__), thing.__code__.co_names, calls)
    else:
        yield from _attributes(thing, None)


def _variable(one: HookVariable, mentioned: tuple[str, ...], calls: int) -> Iterator[HookVariable]:
    try:
        value = one.value
    except ValueError:  # a variable that has no value yet
        return
    if isinstance(value, (type, ModuleType)):
        return
    yield one
    if isinstance(value, nn.Module):
        yield from _attributes(value, mentioned)
    else:
        yield from _of(value, calls + 1)


def _attributes(thing: Any, mentioned: tuple[str, ...] | None) -> Iterator[HookVariable]:
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(thing, _NO_STATE):
        return
    for name in attributes:
        if mentioned is None or name in mentioned:
            yield HookVariable(name, attributes)
