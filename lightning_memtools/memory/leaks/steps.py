"""How one Python object holds another: by an attribute, as an element, as a variable of a function."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import CellType, FunctionType
from typing import Any

from torch import nn


class Kind(Enum):
    """The ways in which an object can hold another."""

    ATTRIBUTE = auto()
    KEY = auto()  # a value of a dict
    INDEX = auto()  # an element of a list, tuple or deque
    MEMBER = auto()  # an element of a set
    VARIABLE = auto()  # what a function has from its surroundings: a closure
    DEFAULT = auto()  # the default value of a function's argument
    OTHER = auto()  # known to Python's garbage collector, but not how


@dataclass(frozen=True, slots=True)
class Step:
    """From a holder to what it holds.

    Attributes:
        kind: The way.
        key: The attribute's or variable's name, the dict's key, the index; None where there is none.
    """

    kind: Kind
    key: Any = None

    @property
    def is_element(self) -> bool:
        """Whether the holder is a container, so that its other elements are held for the same reason."""
        return self.kind in {Kind.KEY, Kind.INDEX, Kind.MEMBER}

    def __str__(self) -> str:
        if self.kind is Kind.ATTRIBUTE:
            return f".{self.key}"
        if self.kind in {Kind.KEY, Kind.INDEX}:
            return f"[{_short(self.key)}]"
        return ""


_REGISTERS = frozenset({"_parameters", "_buffers", "_modules"})
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)


def is_a(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """What isinstance says, without asking the object: proxies and lazy objects answer by running code of their own."""
    return issubclass(type(one), kinds)


def steps_along(chain: Sequence[Any]) -> list[Step]:
    """The steps of a chain of references, outermost object first.

    Objects that Python puts in between (a `__dict__`, a closure's tuple and cell, nn.Module's registers) are left out,
    so there can be fewer steps than links.
    """
    steps: list[Step] = []
    at = 0
    while at + 1 < len(chain):
        step, links = _next_step(chain[at:])
        steps.append(step)
        at += links
    return steps


def follow(root: Any, steps: Sequence[Step]) -> Iterator[Any]:
    """Whatever is found from the root in the same way: along the steps, and at all other elements of containers."""
    if not steps:
        yield root
        return
    for held in _held(root, steps[0]):
        yield from follow(held, steps[1:])


def _next_step(chain: Sequence[Any]) -> tuple[Step, int]:
    """The first step of a chain, and how many links it takes."""
    holder, held, *rest = chain
    if is_a(holder, FunctionType):
        return _step_of_function(holder, held, rest)
    if is_a(held, dict) and rest and _is_namespace(holder, held):
        name = _key_of(held, rest[0])
        if name in _REGISTERS and is_a(holder, nn.Module) and len(rest) > 1:
            return Step(Kind.ATTRIBUTE, _key_of(rest[0], rest[1])), 3
        return Step(Kind.ATTRIBUTE, name), 2
    return _direct_step(holder, held), 1


def _direct_step(holder: Any, held: Any) -> Step:
    if is_a(holder, dict):
        return Step(Kind.KEY, _key_of(holder, held))
    if is_a(holder, _SEQUENCES):
        return Step(Kind.INDEX, next((i for i, value in enumerate(holder) if value is held), None))
    if is_a(holder, _SETS):
        return Step(Kind.MEMBER)
    # Python may keep attributes without making a dict of them.
    for name in (*(namespace_of(holder) or ()), *_slots(type(holder))):
        if getattr(holder, name, None) is held:
            return Step(Kind.ATTRIBUTE, name)
    return Step(Kind.OTHER)


def _step_of_function(function: FunctionType, held: Any, rest: Sequence[Any]) -> tuple[Step, int]:
    if held is function.__closure__ and len(rest) > 1:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell is rest[0]:
                return Step(Kind.VARIABLE, name), 3
    if held is function.__defaults__ and rest:
        return Step(Kind.DEFAULT), 2
    if held is function.__dict__ and rest:
        return Step(Kind.ATTRIBUTE, _key_of(function.__dict__, rest[0])), 2
    return Step(Kind.OTHER), 1


def _held(holder: Any, step: Step) -> list[Any]:
    if step.is_element:
        if is_a(holder, dict):
            return list(holder.values())
        return list(holder) if is_a(holder, (*_SEQUENCES, *_SETS)) else []
    if step.kind is Kind.ATTRIBUTE:
        return [getattr(holder, step.key, None)]
    if is_a(holder, FunctionType) and step.kind is Kind.DEFAULT:
        return list(holder.__defaults__ or ())
    if is_a(holder, FunctionType) and step.kind is Kind.VARIABLE:
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        return [content_of(cell) for name, cell in cells if name == step.key]
    return gc.get_referents(holder)


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """An object's own `__dict__`; None if it has none, or is a class."""
    if is_a(holder, type):
        return None
    try:
        namespace = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return None
    return namespace if is_a(namespace, dict) else None


def _is_namespace(holder: Any, held: dict[Any, Any]) -> bool:
    # A class shows its dict through a proxy only, so it cannot be compared; it holds no other dict itself.
    return is_a(holder, type) or namespace_of(holder) is held


def _key_of(mapping: dict[Any, Any], held: Any) -> Any:
    return next((key for key, value in mapping.items() if value is held), None)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if is_a(slots, str) else slots


def content_of(cell: CellType) -> Any:
    """The value of a closure's variable; None where it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet, or no more
        return None


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004, what fits in a line
