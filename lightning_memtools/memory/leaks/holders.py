"""Finds what holds a tensor: the chain of Python references from an object with a name down to the tensor."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any

from torch import Tensor, nn

from lightning_memtools._torch import BACKWARD_HOOKS, MODULE_REGISTERS, backward_hooks_of
from lightning_memtools.memory.nested_tensors import slot_names

# Every link costs one pass over all Python objects. `module.metric.state["preds"][3]` has eight links, counting the
# `__dict__`s.
MAX_LINKS = 12
# gc.get_referrers compares every reference with every object asked for.
MAX_ASKED_AT_ONCE = 16
_MAX_KEY_LENGTH = 40


class ReferenceKind(Enum):
    """The kinds of references between Python objects."""

    ATTRIBUTE = auto()
    KEY = auto()  # a value of a dict
    INDEX = auto()  # an element of a list, tuple or deque
    MEMBER = auto()  # an element of a set
    VARIABLE = auto()  # what a function has from its surroundings: a closure
    DEFAULT = auto()  # the default value of a function's argument
    OTHER = auto()  # Python's garbage collector sees the reference, but not its kind


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One reference from a holder to an object that it holds.

    Attributes:
        kind: The kind of the reference.
        key: The name of the attribute or variable, the key of the dict, or the index; None where there is none.
    """

    kind: ReferenceKind
    key: Any = None

    @property
    def is_element(self) -> bool:
        """True where the holder is a container, so that its other elements are held for the same reason."""
        return self.kind in {ReferenceKind.KEY, ReferenceKind.INDEX, ReferenceKind.MEMBER}

    def __str__(self) -> str:
        if self.kind is ReferenceKind.ATTRIBUTE:
            return f".{self.key}"
        if self.kind in {ReferenceKind.KEY, ReferenceKind.INDEX}:
            return f"[{_short(self.key)}]"
        return ""


_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)


def is_a(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like isinstance, but without asking the object: a proxy or lazy object would run its own code."""
    return issubclass(type(one), kinds)


def steps_along(chain: Sequence[Any]) -> list[ReferenceStep]:
    """Return the steps of a chain of references, from the outermost object inwards.

    Objects that Python puts in between (a `__dict__`, a closure's tuple and cell, nn.Module's registers) are left out,
    so there can be fewer steps than links.
    """
    steps: list[ReferenceStep] = []
    at = 0
    while at + 1 < len(chain):
        step, links = _next_step(chain[at:])
        steps.append(step)
        at += links
    return steps


def follow(root: Any, steps: Sequence[ReferenceStep]) -> Iterator[Any]:
    """Yield what the root holds along the steps, and all other elements of the containers on the way."""
    if not steps:
        yield root
        return
    for held in _held(root, steps[0]):
        yield from follow(held, steps[1:])


def _next_step(chain: Sequence[Any]) -> tuple[ReferenceStep, int]:
    """Return the first step of a chain, and the number of links that it takes."""
    holder, held, *rest = chain
    if is_a(holder, FunctionType):
        return _step_of_function(holder, held, rest)
    if is_a(held, dict) and rest and _is_namespace(holder, held):
        name = _key_of(held, rest[0])
        if name in MODULE_REGISTERS and is_a(holder, nn.Module) and len(rest) > 1:
            return ReferenceStep(ReferenceKind.ATTRIBUTE, _key_of(rest[0], rest[1])), 3
        return ReferenceStep(ReferenceKind.ATTRIBUTE, name), 2
    # Python may keep attributes without making a dict of them.
    if rest and is_a(holder, nn.Module) and any(held is getattr(holder, name, None) for name in MODULE_REGISTERS):
        return ReferenceStep(ReferenceKind.ATTRIBUTE, _key_of(held, rest[0])), 2
    return _direct_step(holder, held), 1


def _direct_step(holder: Any, held: Any) -> ReferenceStep:
    if is_a(holder, dict):
        return ReferenceStep(ReferenceKind.KEY, _key_of(holder, held))
    if is_a(holder, _SEQUENCES):
        return ReferenceStep(ReferenceKind.INDEX, next((i for i, value in enumerate(holder) if value is held), None))
    if is_a(holder, _SETS):
        return ReferenceStep(ReferenceKind.MEMBER)
    if is_a(holder, Tensor) and held is backward_hooks_of(holder):
        return ReferenceStep(ReferenceKind.ATTRIBUTE, BACKWARD_HOOKS)
    for name in (*(namespace_of(holder) or ()), *slot_names(type(holder))):
        if getattr(holder, name, None) is held:
            return ReferenceStep(ReferenceKind.ATTRIBUTE, name)
    return ReferenceStep(ReferenceKind.OTHER)


def _step_of_function(function: FunctionType, held: Any, rest: Sequence[Any]) -> tuple[ReferenceStep, int]:
    if held is function.__closure__ and len(rest) > 1:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell is rest[0]:
                return ReferenceStep(ReferenceKind.VARIABLE, name), 3
    if held is function.__defaults__ and rest:
        return ReferenceStep(ReferenceKind.DEFAULT), 2
    if held is function.__dict__ and rest:
        return ReferenceStep(ReferenceKind.ATTRIBUTE, _key_of(function.__dict__, rest[0])), 2
    return ReferenceStep(ReferenceKind.OTHER), 1


def _held(holder: Any, step: ReferenceStep) -> list[Any]:
    if step.is_element:
        if is_a(holder, dict):
            return list(holder.values())
        return list(holder) if is_a(holder, (*_SEQUENCES, *_SETS)) else []
    if step.kind is ReferenceKind.ATTRIBUTE:
        return [getattr(holder, step.key, None)]
    if is_a(holder, FunctionType) and step.kind is ReferenceKind.DEFAULT:
        return list(holder.__defaults__ or ())
    if is_a(holder, FunctionType) and step.kind is ReferenceKind.VARIABLE:
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        return [content_of(cell) for name, cell in cells if name == step.key]
    return gc.get_referents(holder)


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """Return an object's own `__dict__`; None if it has none, or is a class."""
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


def content_of(cell: CellType) -> Any:
    """Return the value of a closure's variable; None where it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet, or was deleted
        return None


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _MAX_KEY_LENGTH else f"{text[: _MAX_KEY_LENGTH - 3]}..."


@dataclass(frozen=True, slots=True)
class TensorHolder:
    """An object with a name that holds a tensor, and the references that lead from it to the tensor.

    Attributes:
        root: The outermost object.
        name: The root's name, such as ``"MyModel"`` or ``"MyModel.metric"``; for a function with its file and line.
        steps: The references from the root to the tensor.
        links: Every object on the way, the root first, without the tensor.
    """

    root: Any
    name: str
    steps: tuple[ReferenceStep, ...]
    links: tuple[Any, ...]

    @property
    def path(self) -> str:
        """The expression for the tensor, such as ``"MyModel.outputs[3]"``."""
        return self._spelled(self.steps)

    @property
    def container_path(self) -> str:
        """The expression for the first list, dict or set on the way, such as ``"MyModel.outputs"``, else the tensor."""
        return self._spelled(self._steps_to_container())

    @property
    def place(self) -> str:
        """The closure in which a path begins, such as ``" in the closure of hook (run.py:12)"``; else empty."""
        if self.steps and self.steps[0].kind is ReferenceKind.VARIABLE:
            return f" in the closure of {self.name}"
        return ""

    @property
    def container(self) -> Any:
        """The object at `container_path`."""
        return next(follow(self.root, self._steps_to_container()), None)

    def holds(self) -> Iterator[Any]:
        """Yield the tensor, and the other elements of the containers on its way."""
        return follow(self.root, self.steps)

    def _steps_to_container(self) -> tuple[ReferenceStep, ...]:
        first = next((i for i, step in enumerate(self.steps) if step.is_element), len(self.steps))
        return self.steps[:first]

    def _spelled(self, steps: Sequence[ReferenceStep]) -> str:
        if steps and steps[0].kind is ReferenceKind.VARIABLE:
            return str(steps[0].key) + "".join(map(str, steps[1:]))
        if steps and steps[0].kind is ReferenceKind.DEFAULT:
            return f"the default value of an argument of {self.name}"
        return self.name + "".join(map(str, steps))


def names_of_modules(model: nn.Module) -> dict[int, str]:
    """Return the names of a model and of all modules in it, such as ``"MyModel.encoder.0"``, by identity."""
    own = type(model).__name__
    return {id(module): f"{own}.{name}" if name else own for name, module in model.named_modules()}


def find_holder(
    held: Any, names: Mapping[int, str], *, ignore: Sequence[Any] = (), past_functions: bool = False
) -> TensorHolder | None:
    """Find the nearest object with a name that holds another: a known object, a global, a class or a closure.

    Args:
        held: The object that is held.
        names: The names of known objects by identity, as `names_of_modules` returns them.
        ignore: Containers of the caller that hold the object too.
        past_functions: Find what holds the function or generator, where one of these holds the object.

    Returns:
        The holder; None if Python's garbage collector sees none. Local variables of running functions do not count, and
        the collector does not see what C++ holds, such as an autograd graph.
    """
    # Breadth first, upwards. `held_by[id]` is the link through which an object was found.
    held_by: dict[int, tuple[Any, Any]] = {id(held): (held, None)}
    level: list[Any] = [held]
    ignored = {id(one) for one in (level, held_by, ignore, *ignore)} | _running_frames()
    outermost: Any = None
    for _ in range(MAX_LINKS):
        referrers = _referrers(level)
        ignored |= {id(referrers), id(level)}
        found: list[Any] = []
        ignored.add(id(found))
        for referrer in referrers:
            if id(referrer) in ignored or id(referrer) in held_by or not _counts(referrer):
                continue
            child = _referent_among(referrer, level)
            if child is None:
                continue
            held_by[id(referrer)] = (referrer, child)
            is_passed = past_functions and is_a(referrer, (FunctionType, GeneratorType))
            if not is_passed and (name := _name_of(referrer, names)):
                return _holder(referrer, name, held_by)
            if not is_a(referrer, (dict, list, tuple, set, frozenset, CellType, FrameType, TracebackType)):
                outermost = referrer
            found.append(referrer)
        level = found[:MAX_ASKED_AT_ONCE]
        ignored.add(id(level))
        if not level:
            break
    return None if outermost is None else _holder(outermost, type(outermost).__name__, held_by)


def all_tensors() -> list[Tensor]:
    """Return all tensors that Python has an object of."""
    # The referrers of a class are its instances and a few others. Finding them takes a third of the time of looking at
    # all objects in Python. Types are compared exactly: isinstance would run code of proxies and mocks.
    kinds = {kind for kind in _with_subclasses(Tensor) if _has_storage(kind)}
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _has_storage(kind: type) -> bool:
    # Torch's other subclasses wrap tensors, which are found by themselves; every further class costs time.
    return not kind.__module__.startswith("torch.") or issubclass(kind, nn.Parameter)


def first_held(candidates: Sequence[Any], *, ignore: Sequence[Any] = ()) -> Any:
    """Return the first of the candidates that another Python object holds; None if there is none.

    It takes one pass over all objects. Tensors that only C++ holds, because a graph saved them, have Python objects
    too, so many candidates can be of that kind.
    """
    ignored = {id(one) for one in (candidates, ignore, *ignore)} | _running_frames()
    referrers = [one for one in _referrers(candidates) if id(one) not in ignored and _counts(one)]
    held = {id(one) for referrer in referrers for one in gc.get_referents(referrer)}
    return next((one for one in candidates if id(one) in held), None)


def _holder(root: Any, name: str, held_by: Mapping[int, tuple[Any, Any]]) -> TensorHolder:
    chain = [root]
    while (child := held_by[id(chain[-1])][1]) is not None:
        chain.append(child)
    steps = tuple(steps_along(chain))
    module = sys.modules.get(name) if is_a(root, dict) else None
    if module is not None and vars(module) is root:
        return TensorHolder(
            module,
            name,
            (ReferenceStep(ReferenceKind.ATTRIBUTE, steps[0].key), *steps[1:]),
            tuple(chain[:-1]),
        )
    return TensorHolder(root, name, steps, tuple(chain[:-1]))


def _name_of(candidate: Any, names: Mapping[int, str]) -> str | None:
    """Return the name of an object that the user can find; None for any other."""
    if id(candidate) in names:
        return names[id(candidate)]
    if is_a(candidate, FunctionType):
        code = candidate.__code__
        return f"{candidate.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    if is_a(candidate, GeneratorType):
        return f"the generator {candidate.__qualname__}"
    if is_a(candidate, type):
        return str(candidate.__qualname__)
    if is_a(candidate, dict) and "__name__" in candidate:
        name = candidate["__name__"]
        module = sys.modules.get(name) if is_a(name, str) else None
        return str(name) if module is not None and vars(module) is candidate else None
    return None


def _running_frames() -> set[int]:
    """Return the frames of this thread's functions, ours among them. Frames that are not running are in tracebacks."""
    frames: set[int] = set()
    frame = inspect.currentframe()
    while frame is not None:
        frames.add(id(frame))
        frame = frame.f_back
    return frames


def _referrers(held: Sequence[Any]) -> list[Any]:
    """Return all objects that refer to one of these, as far as Python's garbage collector knows them."""
    asked = tuple(held)
    # From Python 3.13 on, the tuple of the arguments is found too.
    return [one for one in gc.get_referrers(*asked) if one is not asked]


def _counts(referrer: Any) -> bool:
    # A module is found through its globals.
    return not is_a(referrer, ModuleType) and type(referrer).__name__ not in {
        "list_iterator",
        "tuple_iterator",
        "dict_valueiterator",
        "dict_itemiterator",
    }


def _referent_among(referrer: Any, level: Sequence[Any]) -> Any:
    # `referrer.__dict__` is not used: asking for it can make Python move the attributes there.
    wanted = {id(one): one for one in level}
    return next((wanted[id(one)] for one in gc.get_referents(referrer) if id(one) in wanted), None)
