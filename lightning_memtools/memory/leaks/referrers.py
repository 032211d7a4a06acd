"""Who holds a tensor: the chain of Python references from something that has a name down to it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any

from torch import nn

from lightning_memtools.memory.leaks.steps import Kind, Step, follow, is_a, steps_along

# Every link costs one pass over all Python objects. `module.metric.state["preds"][3]` has eight, __dict__s included.
MAX_LINKS = 12
# gc.get_referrers compares every reference with every object asked for.
MAX_ASKED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds a tensor.

    Attributes:
        root: The outermost object.
        name: What the root is called: ``"MyModel"``, ``"MyModel.metric"``, or for a function where it is written.
        steps: From the root to the tensor.
        links: Every object on the way, the root first, the tensor left out.
    """

    root: Any
    name: str
    steps: tuple[Step, ...]
    links: tuple[Any, ...]

    @property
    def path(self) -> str:
        """The way to the tensor as one would write it: ``"MyModel.outputs[3]"``."""
        return self._spelled(self.steps)

    @property
    def container_path(self) -> str:
        """The way to the first list, dict or set on it, or to the tensor if there is none: ``"MyModel.outputs"``."""
        return self._spelled(self._steps_to_container())

    @property
    def place(self) -> str:
        """Where a path begins that does not begin with the root's name: ``" in the closure of hook (run.py:12)"``."""
        if self.steps and self.steps[0].kind is Kind.VARIABLE:
            return f" in the closure of {self.name}"
        return ""

    @property
    def container(self) -> Any:
        """The object at `container_path`."""
        return next(follow(self.root, self._steps_to_container()), None)

    def holds(self) -> Iterator[Any]:
        """The tensor, and everything that is held in the same way: the other elements of the containers on its way."""
        return follow(self.root, self.steps)

    def _steps_to_container(self) -> tuple[Step, ...]:
        first = next((i for i, step in enumerate(self.steps) if step.is_element), len(self.steps))
        return self.steps[:first]

    def _spelled(self, steps: Sequence[Step]) -> str:
        if steps and steps[0].kind is Kind.VARIABLE:
            return str(steps[0].key) + "".join(map(str, steps[1:]))
        if steps and steps[0].kind is Kind.DEFAULT:
            return f"the default value of an argument of {self.name}"
        return self.name + "".join(map(str, steps))


def names_of_modules(model: nn.Module) -> dict[int, str]:
    """Identity to name, for a model and all modules in it: ``"MyModel.encoder.0"``."""
    own = type(model).__name__
    return {id(module): f"{own}.{name}" if name else own for name, module in model.named_modules()}


def find_holder(held: Any, names: Mapping[int, str], *, ignore: Sequence[Any] = ()) -> Holder | None:
    """The nearest thing with a name that holds an object: a known object, a global, a class, a closure.

    Args:
        held: The object.
        names: Known objects by identity, such as `names_of_modules` gives.
        ignore: Containers of the caller's that hold the object too.

    Returns:
        None if Python's garbage collector knows of no holder: local variables of running functions do not count, and
        what C++ holds (an autograd graph, say) is not known to it.
    """
    # Breadth first, upwards. `held_by[id]` is the link through which an object was found.
    held_by: dict[int, tuple[Any, Any]] = {id(held): (held, None)}
    level: list[Any] = [held]
    ignored = {id(one) for one in (level, held_by, ignore, *ignore)}
    outermost: Any = None
    for _ in range(MAX_LINKS):
        referrers = gc.get_referrers(*level)
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
            if name := _name_of(referrer, names):
                return _holder(referrer, name, held_by)
            if not is_a(referrer, (dict, list, tuple, set, frozenset, CellType)):
                outermost = referrer
            found.append(referrer)
        level = found[:MAX_ASKED_AT_ONCE]
        ignored.add(id(level))
        if not level:
            break
    return None if outermost is None else _holder(outermost, type(outermost).__name__, held_by)


def first_held(candidates: Sequence[Any], *, ignore: Sequence[Any] = ()) -> Any:
    """The first of some objects that any other Python object holds; None if there is none. One pass over all objects.

    Tensors that only C++ holds (a graph saved them) have Python objects too, so many candidates can be of that kind.
    """
    ignored = {id(one) for one in (candidates, ignore, *ignore)}
    referrers = [one for one in gc.get_referrers(*candidates) if id(one) not in ignored and _counts(one)]
    held = {id(one) for referrer in referrers for one in gc.get_referents(referrer)}
    return next((one for one in candidates if id(one) in held), None)


def _holder(root: Any, name: str, held_by: Mapping[int, tuple[Any, Any]]) -> Holder:
    chain = [root]
    while (child := held_by[id(chain[-1])][1]) is not None:
        chain.append(child)
    steps = tuple(steps_along(chain))
    if is_a(root, dict):  # a module's globals
        return Holder(sys.modules[name], name, (Step(Kind.ATTRIBUTE, steps[0].key), *steps[1:]), tuple(chain[:-1]))
    return Holder(root, name, steps, tuple(chain[:-1]))


def _name_of(candidate: Any, names: Mapping[int, str]) -> str | None:
    """What an object is called, if it is one that everybody can find."""
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


def _counts(referrer: Any) -> bool:
    # Frames are functions at work, ours among them; a module is found through its globals.
    return not is_a(referrer, (FrameType, TracebackType, ModuleType)) and type(referrer).__name__ not in {
        "list_iterator",
        "tuple_iterator",
        "dict_valueiterator",
        "dict_itemiterator",
    }


def _referent_among(referrer: Any, level: Sequence[Any]) -> Any:
    # Not by way of `referrer.__dict__`: asking for it can make Python move the attributes there.
    wanted = {id(one): one for one in level}
    return next((wanted[id(one)] for one in gc.get_referents(referrer) if id(one) in wanted), None)
