"""The random streams of the process: Python's, NumPy's and torch's, read and restored together."""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)  # not frozen: one is made in each step, and a frozen one takes three times as long
class RandomState:
    """The state of every random stream at one moment."""

    python: Any  # of the module `random`
    torch_cpu: Tensor  # of torch's default generator on the CPU
    # of the default generator of each CUDA device, None for one that was not read; None as long as CUDA is not
    # initialised
    cuda: Sequence[Tensor | None] | None
    mps: Tensor | None  # of the default generator of Apple's GPU, where there is one
    numpy: Any  # of NumPy's global generator; None as long as NumPy is not imported

    @classmethod
    def now(
        cls,
        numpy_reader: NumpyStateReader | None = None,
        python_reader: PythonStateReader | None = None,
        *,
        device: torch.device | None = None,
    ) -> RandomState:
        """Read the state of every stream. Does not wait for the device.

        Args:
            numpy_reader: Reads NumPy's state, for a caller that asks again and again.
            python_reader: Likewise.
            device: The only device whose stream is read.
        """
        cuda: Any = torch.cuda
        read_numpy = numpy_reader or NumpyStateReader()
        return cls(
            python=random.getstate() if python_reader is None else python_reader(),
            torch_cpu=torch.get_rng_state(),
            # Asking for the state would initialise CUDA.
            cuda=_cuda_states(device) if cuda.is_initialized() else None,
            mps=torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
            numpy=read_numpy(),
        )

    def restore(self) -> None:
        """Set every stream to this state; streams that it does not hold stay as they are."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.cuda is not None:
            for index, state in enumerate(self.cuda):
                if state is not None:
                    torch.cuda.set_rng_state(state, index)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
        if self.numpy is not None:
            numpy: Any = importlib.import_module("numpy")
            numpy.random.set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return (
            self.python == other.python
            and _same_tensors([self.torch_cpu], [other.torch_cpu])
            and _same_tensors(self.cuda, other.cuda)
            and _same_tensors([self.mps], [other.mps])
            and _numpy_as_plain(self.numpy) == _numpy_as_plain(other.numpy)
        )

    __hash__ = None  # type: ignore[assignment]


def _cuda_states(device: torch.device | None) -> list[Tensor | None]:
    if device is None:
        return list(torch.cuda.get_rng_state_all())
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    return [*[None] * index, torch.cuda.get_rng_state(index)]


GENERATORS = frozenset({"Generator", "Random", "RandomState"})
"""The names of the classes of random generators of torch, Python and NumPy, which may not be imported."""


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, Python or NumPy; None for any other object.

    It is None for the system's random numbers too: they have no state.
    """
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


_N_BYTES = 4 * 625  # of a Mersenne Twister: 624 numbers, and the position in them


class _FewWords:
    """Reads a few words of a Mersenne Twister's memory: they tell whether anybody has drawn from it or seeded it.

    A draw moves the position, which is one of them; 624 draws or a seed change all numbers. The chance that the others
    stay is one in 2 to the 160.
    """

    def __init__(self, address: int) -> None:
        self._words = [ctypes.c_uint64.from_address(address + at) for at in (0, 16, 1000, _N_BYTES - 8)]

    def read(self) -> list[int]:
        return [word.value for word in self._words]


class PythonStateReader:
    """Reads the state of the module `random`; quickly as long as nobody draws from it.

    Python makes 624 numbers of its state, which is most of the cost of a step's start for a small model. A few words of
    its memory are compared instead, where that is laid out as in CPython: position and numbers, behind the head.
    """

    def __init__(self) -> None:
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._state = random.getstate()
        self._words: _FewWords | None = None
        if type(self._generator) is random.Random and sys.implementation.name == "cpython":
            address, numbers = id(self._generator) + object.__basicsize__, self._state[1]
            if ctypes.string_at(address, _N_BYTES) == struct.pack("=i624I", numbers[-1], *numbers[:-1]):
                self._words = _FewWords(address)
                self._known = self._words.read()

    def __call__(self) -> Any:
        """Return the state."""
        # What `gauss` keeps is in no memory that is compared.
        if self._words is None or self._generator.gauss_next is not None:
            return random.getstate()
        words = self._words.read()
        if words != self._known or self._state[2] is not None:
            self._state, self._known = random.getstate(), words
        return self._state


class NumpyStateReader:
    """Reads the state of NumPy's global generator; quickly as long as nobody draws from it.

    NumPy takes some 50 microseconds to return its state. A few words of the generator's memory are compared in one.
    They do not show the half of a pair of normal numbers that NumPy may keep, so that once the generator has moved, or
    where it has such a half, its state is always asked for.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._known: list[int] = []
        self._moves = False
        self._generator: Any = None
        self._words: _FewWords | None = None

    def __call__(self) -> Any:
        """Return the state; None as long as NumPy is not imported."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return None
        if self._moves:
            return numpy.random.get_state()
        words = self._read(numpy)
        if self._state is None or words != self._known:
            self._moves = not words or self._state is not None
            self._state, self._known = numpy.random.get_state(), words
            self._moves = self._moves or bool(self._state[3])
        return self._state

    def _read(self, numpy: Any) -> list[int]:
        """Return state words of NumPy's global generator; an empty list if it is not a Mersenne Twister."""
        get_bit_generator = getattr(numpy.random, "get_bit_generator", None)  # NumPy 1.24
        generator: Any = None if get_bit_generator is None else get_bit_generator()
        if generator is not self._generator:
            self._generator, is_twister = generator, type(generator).__name__ == "MT19937"
            self._words = _FewWords(generator.ctypes.state_address) if is_twister else None
        return [] if self._words is None else self._words.read()


@contextmanager
def random_streams_restored() -> Iterator[None]:
    """On exit every random stream continues from where it was on entry, whatever was drawn or seeded in between."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


def _same_tensors(one: Sequence[Tensor | None] | None, other: Sequence[Tensor | None] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


def _numpy_as_plain(state: Any) -> Any:
    """Return NumPy's state without arrays, which have no single truth value when compared."""
    if not isinstance(state, tuple):
        return state
    return [value.tolist() if hasattr(value, "tolist") else value for value in state]
