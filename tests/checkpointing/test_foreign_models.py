"""Models that nobody here wrote are planned by default, trained bit for bit as without, and need what was predicted.

The same is measured for more of them by benchmarks/checkpointing_bitwise.py, whose results are checked here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.foreign_models import FOREIGN, MORE, made, measured_peak, trains_the_same

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "checkpointing_bitwise.json"


@pytest.mark.parametrize("name", FOREIGN)
def test_training_is_bitwise_the_same_and_the_peak_is_the_predicted_one(name):
    model, batch = made(name)
    plan = plan_checkpoints(model, batch, bn_dropout="recompute")
    assert plan.refused is None
    assert plan.peak_bytes < 0.99 * plan.plain_peak_bytes
    assert measured_peak(model, batch, plan) == pytest.approx(plan.peak_bytes, rel=0.01)
    for bf16 in (False, True):
        assert trains_the_same(name, plan, bf16=bf16) == {}


def test_thirty_models_were_trained_bit_for_bit_the_same():
    found = json.loads(RESULTS.read_text())["models"]
    assert set(found) == FOREIGN.keys() | MORE.keys()
    planned = {name: one for name, one in found.items() if one["refused"] is None}
    assert len(planned) >= 30
    assert all(one["fp32_differs"] == one["bf16_differs"] == {} for one in planned.values())


def test_predicted_peaks_are_those_that_were_measured_or_a_little_higher():
    found = [one for one in json.loads(RESULTS.read_text())["models"].values() if one["refused"] is None]
    off = [one["predicted_peak_bytes"] / one["measured_peak_bytes"] - 1 for one in found]
    assert sum(abs(one) <= 0.01 for one in off) >= 36
    assert all(-0.01 <= one <= 0.07 for one in off)
