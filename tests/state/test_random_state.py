from __future__ import annotations

import io
import random

import numpy as np
import pytest
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


def test_streams_are_restored_after_an_error():
    before = RandomState.now()
    with pytest.raises(ZeroDivisionError), random_streams_restored():
        draw()[0] / 0
    assert RandomState.now() == before


def test_a_packed_state_can_be_loaded_as_weights_only():
    state = RandomState.now()
    file = io.BytesIO()
    torch.save(state.packed(), file)
    file.seek(0)
    draw()
    unpacked = RandomState.unpacked(torch.load(file, weights_only=True))
    assert unpacked == state


def test_streams_that_a_packed_state_lacks_stay_as_they_are():
    state = RandomState.unpacked({})
    assert state == RandomState.now()
