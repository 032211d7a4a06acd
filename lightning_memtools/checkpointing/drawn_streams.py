"""The random streams that torch's checkpoint does not restore: Python's, NumPy's, and generators that modules hold."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Two functions: one reads a stream's state, the other sets it."""


class DrawnStreams:
    """The streams that layers may draw from besides torch's default ones.

    Args:
        modules: The layers. Generators that they hold as attributes, or in a list or dictionary that is one, are found
            here; those that a layer makes later are not.
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
    for module in modules:
        for value in vars(module).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for one in (value, *inside):
                stream = _stream_of(one)
                if stream is not None and id(one) not in seen:
                    seen.add(id(one))
                    yield stream


def _stream_of(value: Any) -> Stream | None:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
