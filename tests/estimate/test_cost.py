"""What an estimate costs, by the committed benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GIB = 2**30
RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "estimate.json").read_text())
SECONDS = {"ResNet-50, batch 8": 2, "GPT-2 small, 4 x 512": 2, "7B transformer, 1 x 1024": 10}


@pytest.mark.parametrize("model", SECONDS)
def test_an_estimate_takes_seconds_and_little_memory(model):
    measured = RESULTS[model]["estimate_memory"]
    assert measured["seconds"]["runs"] >= 5
    assert measured["seconds"]["three_quarters"] < SECONDS[model]
    assert measured["host_bytes_added"] < GIB
    assert measured["host_bytes_peak"] < GIB


@pytest.mark.parametrize("model", SECONDS)
def test_it_is_quicker_than_memtracker_on_the_same_model(model):
    ours, theirs = (RESULTS[model][name]["seconds"]["median"] for name in ("estimate_memory", "MemTracker"))
    assert 2 * ours < theirs


def test_the_cost_benchmark_measured_the_whole_model():
    assert RESULTS["ResNet-50, batch 8"]["estimate_memory"]["parameters"] == 25_557_032
    assert RESULTS["GPT-2 small, 4 x 512"]["estimate_memory"]["parameters"] == 124_439_808
    large = RESULTS["7B transformer, 1 x 1024"]["estimate_memory"]
    assert large["parameters"] > 6_500_000_000
    # Parameters, gradients, two moments and one copy of them, in float32.
    assert large["peak_allocated"] > 5 * 4 * large["parameters"]
