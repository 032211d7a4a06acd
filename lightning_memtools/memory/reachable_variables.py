"""The variables that functions can reach besides their arguments: closures, globals, attributes of objects."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_memtools._torch import hooks_of
from lightning_memtools.memory.leaks.holders import content_of
from lightning_memtools.memory.user_code import owner_of

# Hooks call functions of the user that call others; further away lies the rest of the program.
_MOST_CALLS = 3
_NO_STATE = (str, bytes, type, ModuleType, Tensor, CellType, list, dict, set, tuple)
_STEPS = ("forward", "training_step")
_MOST_FUNCTIONS = 1000  # of a class that are followed
_FOLLOWED = ("user", "installed")

CachedFunction: Any = type(lru_cache(abs))
"""The class of functions that functools.lru_cache made."""


@dataclass(frozen=True, slots=True)
class ReachableVariable:
    """A variable of a closure, a global variable, or an attribute of an object.

    Attributes:
        name: The variable's name.
        holder: What holds the value: the cell of the closure, or the dict of the globals or attributes.
    """

    name: str
    holder: CellType | dict[str, Any]

    @property
    def value(self) -> Any:
        """The variable's value; None if it was deleted."""
        return content_of(self.holder) if isinstance(self.holder, CellType) else self.holder.get(self.name)

    def put(self, value: Any) -> None:
        """Set the variable to a new value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Collection[str]:
    """Return the names of the globals and attributes that a function's code uses, including its nested functions."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return dict.fromkeys([*code.co_names, *(name for names in inner for name in names)])


def variables_named_by(function: FunctionType) -> Iterator[ReachableVariable]:
    """Yield the closure variables of a function and the globals that its code uses. Skip variables without a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # only empty cells are equal to an empty one: those have no value yet
            yield ReachableVariable(name, cell)
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield ReachableVariable(name, function.__globals__)


def variables_of_hooks(module: nn.Module) -> list[ReachableVariable]:
    """Return the distinct variables that a module's hooks can reach, not counting the hooks' arguments."""
    found: dict[tuple[int, str], ReachableVariable] = {}
    for hook in hooks_of(module):
        for one in _of(hook, 0):
            found.setdefault((id(one.holder), one.name), one)
    return list(found.values())


def _of(thing: Any, calls: int) -> Iterator[ReachableVariable]:
    """Yield the variables that `thing` (a function or object) can reach. `calls` is the call depth below a hook."""
    if calls > _MOST_CALLS or isinstance(thing, _NO_STATE) or thing is None:
        return
    if isinstance(thing, partial):
        for one in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _of(one, calls)
    elif isinstance(thing, MethodType):
        yield from _of(thing.__func__, calls)
        # Of a whole model only what the method names: the rest has nothing to do with it.
        code = getattr(thing.__func__, "__code__", None)
        mentioned = None if code is None or not isinstance(thing.__self__, nn.Module) else names_in(code)
        yield from _attributes(thing.__self__, mentioned)
    elif isinstance(thing, FunctionType):
        mentioned = names_in(thing.__code__)
        for variable in variables_named_by(thing):
            if isinstance(value := variable.value, (type, ModuleType)):
                continue
            yield variable
            if isinstance(value, nn.Module):
                yield from _attributes(value, mentioned)
            else:
                yield from _of(value, calls + 1)
    else:
        yield from _attributes(thing, None)


def _attributes(thing: Any, mentioned: Collection[str] | None) -> Iterator[ReachableVariable]:
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(thing, _NO_STATE):
        return
    for name in attributes:
        if mentioned is None or name in mentioned:
            yield ReachableVariable(name, attributes)


def values_named_in_steps(kind: type[nn.Module]) -> Iterator[Any]:
    """Yield the globals, closure variables and methods that the code of a class's forward and training_step uses.

    Functions and methods among these are searched too, except those of torch, Lightning and the standard library.
    """
    attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    waiting = [attributes.get(name) for name in _STEPS]
    seen: set[FunctionType] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        value = _unwrapped(waiting.pop())
        yield value
        function = value.__wrapped__ if isinstance(value, CachedFunction) else value
        if not isinstance(function, FunctionType) or function in seen:
            continue
        if owner_of(function.__code__.co_filename) not in _FOLLOWED:
            continue
        seen.add(function)
        names = names_in(function.__code__)
        waiting += [attributes[name] for name in names if name in attributes]
        for variable in variables_named_by(function):
            value = variable.value
            waiting.append(value)
            if isinstance(value, ModuleType) and owner_of(value.__dict__.get("__file__") or "<") in _FOLLOWED:
                waiting += [value.__dict__[name] for name in names if name in value.__dict__]


def _unwrapped(value: Any) -> Any:
    """Return the function that a method, a property or a partial wraps; return anything else unchanged."""
    if isinstance(value, (classmethod, staticmethod, MethodType)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, (partial, cached_property)) else value
