"""Finds what holds a tensor: the chain of Python references from an object with a name down to the tensor."""

from __future__ import annotations

import functools
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
from torch.utils.data import Dataset

from lightning_memtools._torch import BACKWARD_HOOKS, MODULE_REGISTERS
from lightning_memtools.memory.nested_tensors import slot_names

# Every link costs one pass over all Python objects. `module.metric.state["preds"][3]` has eight links, counting the
# `__dict__`s.
MAX_LINKS = 12
# gc.get_referrers compares every reference with every object asked for.
MAX_ASKED_AT_ONCE = 16
_MAX_KEY_LENGTH = 40
LruCache = type(functools.lru_cache(lambda: None))
GRADIENT = "grad"
_OURS = "lightning_memtools."
_OF_THE_SEARCH = __name__.rpartition(".")[0]


class ReferenceKind(Enum):
    """The kinds of references between Python objects, such as an attribute or an element of a list."""

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
        key: The name of the attribute or variable, the key of the dict, or the index; None if there is none.
    """

    kind: ReferenceKind
    key: Any = None

    @property
    def is_element(self) -> bool:
        """True if the reference leads to an element of a container, such as a list or a dict."""
        return self.kind in {ReferenceKind.KEY, ReferenceKind.INDEX, ReferenceKind.MEMBER}

    def __str__(self) -> str:
        if self.kind is ReferenceKind.ATTRIBUTE:
            return f".{self.key}"
        if self.kind in {ReferenceKind.KEY, ReferenceKind.INDEX}:
            return f"[{_short(self.key)}]"
        return ""


def is_a(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether an object's type is a subclass of `kinds`. Unlike isinstance, this never runs a proxy's code."""
    return issubclass(type(one), kinds)


def steps_along(chain: Sequence[Any]) -> list[ReferenceStep]:
    """Return the references along a chain of objects, in which each object holds the next.

    Objects that Python puts in between are skipped, such as a `__dict__`, the cells of a closure, or the dicts in
    which nn.Module keeps its parameters. So the result can be shorter than the chain.
    """
    steps: list[ReferenceStep] = []
    at = 0
    while at + 1 < len(chain):
        ahead = {id(link): at + n for n, link in enumerate(chain[at + 1 : at + 4], 1)}
        found = [(ahead[id(held)], step) for step, held in _references(chain[at]) if id(held) in ahead]
        at, step = max(found, key=lambda one: one[0], default=(at + 1, ReferenceStep(ReferenceKind.OTHER)))
        steps.append(step)
    return steps


def follow(root: Any, steps: Sequence[ReferenceStep]) -> Iterator[Any]:
    """Yield the objects that `steps` lead to from `root`. A step to a container's element leads to every element."""
    if not steps:
        yield root
        return
    first, *rest = steps
    if first.key == GRADIENT and is_a(root, Tensor):
        held = [root.grad]
    elif first.kind is ReferenceKind.OTHER:
        held = gc.get_referents(root)
    else:
        held = [one for step, one in _references(root) if step == first or (first.is_element and step.is_element)]
    for one in held:
        yield from follow(one, rest)


def _references(holder: Any) -> Iterator[tuple[ReferenceStep, Any]]:
    """Yield (reference, referenced object) for all that `holder` refers to, such as its attributes or elements."""
    if is_a(holder, dict):
        yield from ((ReferenceStep(ReferenceKind.KEY, key), held) for key, held in list(holder.items()))
    elif is_a(holder, (list, tuple, deque)):
        yield from ((ReferenceStep(ReferenceKind.INDEX, index), held) for index, held in enumerate(list(holder)))
    elif is_a(holder, (set, frozenset)):
        yield from ((ReferenceStep(ReferenceKind.MEMBER), held) for held in list(holder))
    elif is_a(holder, FunctionType):
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True):
            yield ReferenceStep(ReferenceKind.VARIABLE, name), content_of(cell)
        for default in (*(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()):
            yield ReferenceStep(ReferenceKind.DEFAULT), default
    if is_a(holder, Tensor):
        yield ReferenceStep(ReferenceKind.ATTRIBUTE, BACKWARD_HOOKS), getattr(holder, BACKWARD_HOOKS, None)
    attributes = dict(vars(holder)) if is_a(holder, type) else {**(namespace_of(holder) or {})}
    attributes |= {name: getattr(holder, name, None) for name in slot_names(type(holder))}
    for name, held in attributes.items():
        yield ReferenceStep(ReferenceKind.ATTRIBUTE, name), held
        if name in MODULE_REGISTERS and is_a(holder, nn.Module):
            yield from ((ReferenceStep(ReferenceKind.ATTRIBUTE, key), part) for key, part in list(held.items()))


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None for a class, or for an object without one."""
    if is_a(holder, type):
        return None
    try:
        namespace = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return None
    return namespace if is_a(namespace, dict) else None


def content_of(cell: CellType) -> Any:
    """Return the value that a closure's cell contains; None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet, or was deleted
        return None


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _MAX_KEY_LENGTH else f"{text[: _MAX_KEY_LENGTH - 3]}..."


@dataclass(frozen=True, slots=True)
class TensorHolder:
    """A named object that holds a tensor, directly or through others, and the references that lead to the tensor.

    Attributes:
        root: The named object.
        name: Its name, such as ``"MyModel"`` or ``"MyModel.metric"``. A function's name includes its file and line.
        steps: The references from the root to the tensor.
        links: Every object on the way to the tensor, starting with the root and excluding the tensor.
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
        """The expression for the tensor's outermost container, such as ``"MyModel.outputs"``; `path` if it has none."""
        return self._spelled(self._steps_to_container())

    @property
    def place(self) -> str:
        """The suffix for a closure variable's path: ``" in the closure of hook (run.py:12)"``; "" for other paths."""
        if self.steps and self.steps[0].kind is ReferenceKind.VARIABLE:
            return f" in the closure of {self.name}"
        return ""

    @property
    def is_gradient(self) -> bool:
        """True if the tensor is the gradient of another tensor."""
        return bool(self.steps) and self.steps[-1].key == GRADIENT

    @property
    def container(self) -> Any:
        """The object that `container_path` names."""
        return next(follow(self.root, self._steps_to_container()), None)

    def holds(self) -> Iterator[Any]:
        """Yield the tensor, and the other elements of the containers on the way to it."""
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
    """Return the names of a model and of all modules in it, such as ``"MyModel.encoder.0"``, by `id`."""
    own = type(model).__name__
    return {id(module): f"{own}.{name}" if name else own for name, module in model.named_modules()}


def find_holder(
    held: Any, names: Mapping[int, str], *, ignore: Sequence[Any] = (), past_functions: bool = False
) -> TensorHolder | None:
    """Find the nearest named object that holds `held`: a known object, a global, a class or a closure.

    Args:
        held: The object that is held.
        names: The names of known objects by `id`, as `names_of_modules` returns them.
        ignore: Containers that do not count as holders, such as the caller's own lists.
        past_functions: Whether to skip functions and generators, and return the object that holds them.

    Returns:
        The holder; None if Python's garbage collector knows none. Local variables of running functions do not count.
        The collector knows no holders in C++, such as an autograd graph.
    """
    # Breadth first, upwards. `held_by[id]` is the link through which an object was found.
    held_by: dict[int, tuple[Any, Any]] = {id(held): (held, None)}
    level: list[Any] = [held]
    ignored = {id(one) for one in (level, held_by, ignore, *ignore)} | _running_frames()
    outermost: Any = None
    ours: TensorHolder | None = None
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
                holder = _holder(referrer, name, held_by)
                if not is_ours(referrer):
                    return holder
                ours = ours or holder
                continue
            if not is_a(referrer, (dict, list, tuple, set, frozenset, CellType, FrameType, TracebackType)):
                outermost = referrer
            found.append(referrer)
        level = found[:MAX_ASKED_AT_ONCE]
        ignored.add(id(level))
        if not level:
            break
    if ours is not None or outermost is None:
        return ours
    return _holder(outermost, type(outermost).__name__, held_by)


def is_ours(root: Any) -> bool:
    """Return whether the object that holds a tensor belongs to this package, and not to the user's code."""
    kind = root if is_a(root, (FunctionType, type)) else type(root)
    name = root.get("__name__") if is_a(root, dict) else kind.__module__
    return str(name).startswith(_OURS)


def all_tensors() -> list[Tensor]:
    """Return all tensors that exist as Python objects."""
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

    This takes one pass over all Python objects. Many candidates may have no such holder, because only C++ holds them:
    for example, tensors that an autograd graph has saved.
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
    """Return the name by which a user can find an object, such as a function or a class; None if it has no name."""
    if id(candidate) in names:
        return names[id(candidate)]
    if is_a(candidate, FunctionType):
        code = candidate.__code__
        return f"{candidate.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    if is_a(candidate, GeneratorType):
        return f"the generator {candidate.__qualname__}"
    if is_a(candidate, (type, Dataset)):
        return str((candidate if is_a(candidate, type) else type(candidate)).__qualname__)
    if is_a(candidate, dict) and "__name__" in candidate:
        name = candidate["__name__"]
        module = sys.modules.get(name) if is_a(name, str) else None
        return str(name) if module is not None and vars(module) is candidate else None
    return None


def _running_frames() -> set[int]:
    """Return the ids of the stack frames of the functions that this thread is running now."""
    frames: set[int] = set()
    frame = inspect.currentframe()
    while frame is not None:
        frames.add(id(frame))
        frame = frame.f_back
    return frames


def _referrers(held: Sequence[Any]) -> list[Any]:
    """Return all objects that refer to one of `held`, as far as Python's garbage collector tracks them."""
    asked = tuple(held)
    # From Python 3.13 on, the tuple of the arguments is found too.
    return [one for one in gc.get_referrers(*asked) if one is not asked]


def _counts(referrer: Any) -> bool:
    # A module is found through its globals.
    if is_a(referrer, ModuleType) or str(type(referrer).__module__).startswith(_OF_THE_SEARCH):
        return False
    return type(referrer).__name__ not in {
        "list_iterator",
        "tuple_iterator",
        "dict_valueiterator",
        "dict_itemiterator",
    }


def _referent_among(referrer: Any, level: Sequence[Any]) -> Any:
    # `referrer.__dict__` is not used: asking for it can make Python move the attributes there.
    wanted = {id(one): one for one in level}
    return next((wanted[id(one)] for one in gc.get_referents(referrer) if id(one) in wanted), None)
