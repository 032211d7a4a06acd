"""Two real processes: a spike of one rank is one of both, and both take the same way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.spike_models import AT, N_BATCHES
from tests.integration import spikes_on_ranks
from tests.integration.spikes_on_ranks import ACTIONS
from tests.two_processes import seen_by_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spikes")


@pytest.fixture(scope="module")
def seen(folder) -> list[dict[str, Any]]:
    """What ranks 0 and 1 saw, by action."""
    return seen_by_ranks(Path(spikes_on_ranks.__file__), folder, timeout_s=240)


@pytest.mark.parametrize("action", ACTIONS)
def test_both_ranks_find_the_same_spike_and_end_with_the_same_weights(action, seen):
    zero, one = (rank[action] for rank in seen)
    assert zero == one
    ((step, done, loss, norm, taken_back),) = zero["spikes"]
    assert (step, done) == (AT, action)
    assert loss > 1000  # of the rank with the bad batch
    assert math.isfinite(norm)
    assert bool(zero["error"]) == (action == "halt")
    steps = {"rollback": N_BATCHES - 1 - taken_back, "halt": AT}
    assert zero["global_step"] == steps.get(action, N_BATCHES)
