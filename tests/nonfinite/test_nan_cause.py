"""HaltOnNaN beside detect_anomaly: what was measured is still so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.nonfinite.gallery import BODY_IS_MASKED, FAILING, HEALTHY

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import nan_cause  # noqa: E402, the benchmarks are no package

MEASURED = json.loads((ROOT / "benchmarks" / "results" / "nan_cause.json").read_text())
ROWS = {(row["model"], row["masked"]): row for row in MEASURED["failing"]}


def test_the_whole_gallery_was_measured():
    assert set(ROWS) == {*((name, False) for name in FAILING), *((name, True) for name in BODY_IS_MASKED)}
    assert [each["model"] for each in MEASURED["healthy"]] == list(HEALTHY)


def test_halt_on_nan_is_always_right_and_the_others_are_not():
    n_models, totals = MEASURED["of"]["models"], MEASURED["totals"]
    ours, anomaly, first = (totals[way] for way in nan_cause.WAYS)
    assert (ours["right"], ours["named nothing"], ours["false alarms"]) == (n_models, 0, 0)
    assert anomaly["right"] < n_models / 4
    assert anomaly["named nothing"] > 0
    assert first["right with a mask"] < MEASURED["of"]["with a mask"] / 2
    assert first["false alarms"] > 0


@pytest.mark.parametrize(("name", "masked"), [("log_of_zero", True), ("fully_masked_softmax", False)])
def test_measured_again_it_is_the_same(name, masked):
    assert nan_cause.measure(name, masked=masked) == ROWS[name, masked]
