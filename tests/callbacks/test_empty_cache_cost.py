"""What EmptyCache costs, by the committed benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "empty_cache.json"


@pytest.fixture(scope="module")
def cases():
    found = json.loads(RESULTS.read_text())["cases"]
    if "largest_share_of_an_evaluation_pct" not in found["EmptyCache"]:
        pytest.skip("benchmarks/results/empty_cache.json is of an older version: run benchmarks/empty_cache.py")
    return found


def test_every_evaluation_of_a_healthy_run_pays_less_than_one_percent(cases):
    ours = cases["EmptyCache"]
    assert ours["live_objects"] > 5_000_000
    assert min(ours["evaluation_s"]) > 5
    assert ours["largest_share_of_an_evaluation_pct"] < 1


def test_emptying_the_cache_blindly_pays_more(cases):
    blind = cases["gc.collect() and empty_cache() every epoch"]
    ours = cases["EmptyCache"]
    assert blind["largest_share_of_an_evaluation_pct"] > 2 * ours["largest_share_of_an_evaluation_pct"]
    # And evaluation finds less room: what training left is still reserved then.
    assert blind["reserved_in_evaluation_gib"][-1] > 2 * ours["reserved_in_evaluation_gib"][-1]
