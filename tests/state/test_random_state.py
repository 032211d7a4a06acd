from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from lightning_memtools.state.capsule.environment import importing_from, origin_now
from lightning_memtools.state.capsule.saved_module import random_from, saved_random
from lightning_memtools.state.random_state import RandomState, random_streams_restored


def draw():
    return random.random(), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002, S311, the global streams are meant


def test_every_stream_is_restored():
    state = RandomState.now()
    drawn = draw()
    assert state != RandomState.now()
    state.restore()
    assert state == RandomState.now()
    assert draw() == drawn


def test_streams_continue_after_the_context_as_if_nothing_was_drawn():
    before = RandomState.now()
    with random_streams_restored():
        torch.manual_seed(1)
        draw()
    assert RandomState.now() == before
    before.restore()


def test_streams_are_restored_after_an_error():
    before = RandomState.now()
    with pytest.raises(ZeroDivisionError), random_streams_restored():
        draw()[0] / 0
    assert RandomState.now() == before


def test_a_state_comes_back_from_a_file_that_holds_no_code():
    random.gauss(0, 1)  # keeps a number for the next call
    np.random.randn()  # noqa: NPY002, as above
    state, file = RandomState.now(), io.BytesIO()
    torch.save(saved_random(state), file)
    file.seek(0)
    draw()
    with importing_from(origin_now()) as find:
        assert random_from(torch.load(file, weights_only=True), find) == state
        assert random_from({}, find) == RandomState.now(), "streams that a file lacks stay as they are"
