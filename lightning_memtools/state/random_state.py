"""The random streams of the process: Python's, NumPy's and torch's, read and restored together."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)  # not frozen: one is made in each step, and a frozen one takes three times as long
class RandomState:
    """The states of the global random generators of Python, NumPy and torch at one moment."""

    python: Any  # of the module `random`
    torch_cpu: Tensor  # of torch's default generator on the CPU
    # of the default generator of each CUDA device, None for one that was not read; None until CUDA is initialised
    cuda: Sequence[Tensor | None] | None
    mps: Tensor | None  # of the default generator of Apple's GPU, where there is one
    numpy: Any  # of NumPy's global generator; None as long as NumPy is not imported

    @classmethod
    def now(cls, *, device: torch.device | None = None) -> RandomState:
        """Read the random states of the host and of `device` (all devices if None). Does not wait for a device."""
        cuda: Any = torch.cuda
        return cls(
            python=random.getstate(),
            torch_cpu=torch.get_rng_state(),
            # Asking for the state would initialise CUDA.
            cuda=_cuda_states(device) if cuda.is_initialized() else None,
            mps=torch.mps.get_rng_state() if _has_mps() else None,
            numpy=_numpy_state(),
        )

    def restore(self) -> None:
        """Reset each generator to the state that was read. Other generators are not changed."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        for index, state in enumerate(self.cuda or ()):
            if state is not None and index < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, index)
        if self.mps is not None and _has_mps():
            torch.mps.set_rng_state(self.mps)
        if self.numpy is not None:
            numpy: Any = importlib.import_module("numpy")
            numpy.random.set_state(self.numpy)

    def as_plain(self) -> dict[str, Any]:
        """Return the states as plain values that `torch.load(weights_only=True)` accepts."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RandomState:
        """Create a RandomState from the values that `as_plain` returned."""
        return cls(**plain)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return _same(self.as_plain(), other.as_plain())

    __hash__ = None  # type: ignore[assignment]


@cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def _cuda_states(device: torch.device | None) -> list[Tensor | None]:
    if device is None:
        return list(torch.cuda.get_rng_state_all())
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    return [*[None] * index, torch.cuda.get_rng_state(index)]


_HAS_HALF_A_PAIR = 3  # the place in NumPy's state that says so
_LATEST: list[tuple[bytes, Any]] = []
"""The memory of NumPy's global generator when its state was last read, and that state."""


def _numpy_state() -> Any:
    """Return the state of NumPy's global generator; None if NumPy has not been imported.

    Reading the state takes 50 microseconds, so it is cached until the generator's memory changes. But NumPy draws
    normal numbers in pairs, and stores the second one outside this memory. Until it is used, nothing is cached.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator: Any = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return numpy.random.get_state()
    memory = ctypes.string_at(generator.ctypes.state_address, 4 * 625)  # 624 numbers, and the position in them
    if not (_LATEST and _LATEST[0][0] == memory and not _LATEST[0][1][_HAS_HALF_A_PAIR]):
        _LATEST[:] = [(memory, numpy.random.get_state())]
    return _LATEST[0][1]


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator (torch, Python or NumPy); None for any other object, and SystemRandom."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    name = type(generator).__name__
    if name == "Generator" and hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state() if name == "RandomState" and hasattr(generator, "set_state") else None


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a random generator to a state that `generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@contextmanager
def random_streams_restored() -> Iterator[None]:
    """Return a context manager that records the states of all global random generators and restores them on exit."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


def _plain(state: Any) -> Any:
    """Return a generator's state with NumPy arrays replaced by lists."""
    if isinstance(state, (tuple, list)):
        return type(state)(map(_plain, state))
    return state.tolist() if type(state).__module__ == "numpy" else state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
