"""The random streams that torch's checkpoint does not restore: Python's, NumPy's, and generators of modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_memtools.memory.reachable_variables import values_named_in_steps
from lightning_memtools.state.random_state import generator_state, set_generator_state

Stream = Any
"""A random generator of torch, Python or NumPy."""


class DrawnStreams:
    """The random streams that layers may draw from, besides torch's default generators.

    Args:
        modules: The layers. Generators are found in their attributes, in lists and dictionaries among these, and in the
            names that their forward uses. A generator that a layer makes later is not found.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = {id(one): one for one in _values_of(modules) if generator_state(one) is not None}
        self._own = list(found.values())

    def now(self) -> list[tuple[Stream, Any]]:
        """Read the state of every stream."""
        streams = [*_global_streams(), *self._own]
        return [(stream, generator_state(stream)) for stream in streams]


@contextmanager
def streams_set_to(states: Sequence[tuple[Stream, Any]]) -> Iterator[None]:
    """Set streams to these states inside the context; on exit, restore them to where they were on entry."""
    present = [(stream, generator_state(stream)) for stream, _ in states]
    _set(states)
    try:
        yield
    finally:
        _set(present)


def _set(states: Iterable[tuple[Stream, Any]]) -> None:
    for stream, state in states:
        set_generator_state(stream, state)


def _global_streams() -> Iterator[Stream]:
    # The functions of each module are methods of one generator.
    python: Any = random
    yield python.getstate.__self__
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random.get_state.__self__


def _values_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    kinds: set[type] = set()
    for module in modules:
        for value in vars(module).values():
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if type(module) not in kinds:
            kinds.add(type(module))
            yield from values_named_in_steps(type(module))
