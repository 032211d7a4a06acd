"""The quick readers of random states return what the streams themselves would, whatever was drawn or seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_memtools.state.random_state import NumpyStateReader, PythonStateReader

DRAWS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "one number": lambda stream: stream.random(),
    "as many as the state holds": lambda stream: [stream.random() for _ in range(312)],
    "a seed": lambda stream: stream.seed(5),
    "another seed": lambda stream: stream.seed(6),
    "half of a pair": lambda stream: stream.normal() if hasattr(stream, "normal") else stream.gauss(0, 1),
    "the other half": lambda stream: stream.normal() if hasattr(stream, "normal") else stream.gauss(0, 1),
    "a shuffle": lambda stream: stream.shuffle(list(range(1000))),
}


@pytest.fixture(autouse=True)
def _streams_put_back() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, the global one
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


@pytest.mark.parametrize("first", DRAWS)
def test_pythons_state_is_the_present_one_after_every_draw(first: str) -> None:
    reader = PythonStateReader()
    for name in (first, *DRAWS, first):
        DRAWS[name](random)
        assert reader() == random.getstate(), name
        assert reader() == random.getstate(), f"{name}, read again"


@pytest.mark.parametrize("first", DRAWS)
def test_numpys_state_is_the_present_one_after_every_draw(first: str) -> None:
    reader = NumpyStateReader()
    reader()
    for name in (first, *DRAWS, first):
        DRAWS[name](np.random)
        for found in (reader(), reader()):
            state: Any = np.random.get_state()  # noqa: NPY002
            name_of, key, *rest = state
            assert (found[0], found[1].tolist(), list(found[2:])) == (name_of, key.tolist(), rest), name


def test_as_long_as_nobody_draws_the_same_object_is_returned() -> None:
    """So nothing is read anew, which is what makes it quick."""
    python, numpy = PythonStateReader(), NumpyStateReader()
    assert python() is python()
    assert numpy() is numpy()
