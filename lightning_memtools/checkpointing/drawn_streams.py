"""The random streams that torch's checkpoint does not restore: Python's, NumPy's, and modules' own generators."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_memtools.memory.reachable_variables import values_named_in_steps
from lightning_memtools.state.random_state import generator_state, set_generator_state

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Two functions: one reads a stream's state, the other sets it."""


class DrawnStreams:
    """The streams that layers may draw from besides torch's default ones.

    Args:
        modules: The layers. Generators that they hold as attributes, or in a list or dictionary that is one, and those
            that the code of their forward names, are found here; those that a layer makes later are not.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._own = list(_own_streams(modules))

    def now(self) -> list[tuple[Stream, Any]]:
        """Read the state of every stream."""
        streams = [(random.getstate, random.setstate), *_numpy_stream(), *self._own]
        return [(stream, stream[0]()) for stream in streams]


@contextmanager
def streams_set_to(states: Sequence[tuple[Stream, Any]]) -> Iterator[None]:
    """While entered, streams continue from these states; on exit, from where they were on entry."""
    present = [(stream, stream[0]()) for stream, _ in states]
    _set(states)
    try:
        yield
    finally:
        _set(present)


def _set(states: Iterable[tuple[Stream, Any]]) -> None:
    for (_, change), state in states:
        change(state)


def _numpy_stream() -> list[Stream]:
    if "numpy" not in sys.modules:
        return []
    numpy_random: Any = importlib.import_module("numpy").random
    return [(numpy_random.get_state, numpy_random.set_state)]


def _own_streams(modules: Iterable[nn.Module]) -> Iterator[Stream]:
    seen: set[int] = set()
    kinds: set[type] = set()
    for module in modules:
        held: list[Any] = []
        for value in vars(module).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            held += [value, *inside]
        if type(module) not in kinds:
            kinds.add(type(module))
            held += values_named_in_steps(type(module))
        for one in held:
            if id(one) not in seen and generator_state(one) is not None:
                seen.add(id(one))
                yield partial(generator_state, one), partial(set_generator_state, one)
