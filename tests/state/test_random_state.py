from __future__ import annotations

import io
import random

import numpy as np
import torch

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


def test_a_state_comes_back_from_a_file_that_holds_no_code():
    random.gauss(0, 1)  # keeps a number for the next call
    np.random.randn()  # noqa: NPY002, as above
    state, file = RandomState.now(), io.BytesIO()
    torch.save(state.as_plain(), file)
    file.seek(0)
    draw()
    again = RandomState.from_plain(torch.load(file, weights_only=True))
    assert again == state
    again.restore()
    assert RandomState.now() == state
