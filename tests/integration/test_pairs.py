"""Every pair of callbacks trains on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import pairs_run
from tests.integration.pairs_run import pairs
from tests.two_processes import run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    run_ranks(Path(pairs_run.__file__), root, timeout_s=400)
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("pair", ["+".join(pair) for pair in pairs()])
def test_both_ranks_train_alike(pair, seen):
    zero, one = (rank.get(pair, {"error": "did not get so far"}) for rank in seen)
    assert zero["error"] == one["error"] == ""
    assert zero == one
    assert zero["steps"] == 3
    if "BatchSizeTuner" in pair:
        assert zero["size"] > 2
    if "GradientCheckpointing" in pair:
        assert zero["recomputes"]
