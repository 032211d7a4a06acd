"""What the docs say of HaltOnNaN beside detect_anomaly is what was measured, and still so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nonfinite.gallery import BODY_IS_MASKED, FAILING, HEALTHY

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import nan_cause  # noqa: E402, the benchmarks are no package

MEASURED = json.loads((ROOT / "benchmarks" / "results" / "nan_cause.json").read_text())
ROWS = {(row["model"], row["masked"]): row for row in MEASURED["failing"]}
DOCS = (ROOT / "docs" / "nan-cause.md").read_text()


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


def cell(found: dict[str, Any]) -> str:
    named = (found["operation"] or "nothing").removeprefix("aten.")
    return f"**{named}**" if found["is_right"] else named


@pytest.mark.parametrize("name", FAILING)
def test_the_table_in_the_docs_holds_what_was_measured(name):
    plain, masked = ROWS[name, False], ROWS.get((name, True))
    ours, anomaly, first = (cell(plain[way]) for way in nan_cause.WAYS)
    with_mask = cell(masked[nan_cause.WAYS[2]]) if masked else ""
    if masked is not None:
        assert [cell(masked[way]) for way in nan_cause.WAYS[:2]] == [ours, anomaly], "a mask changes nothing for these"
    right = plain["right"].removeprefix("aten.")
    assert f"| {name.replace('_', ' ')} | {right} | {ours} | {anomaly} | {first} | {with_mask} |" in DOCS


def test_the_totals_in_the_docs_are_those_measured():
    of, totals = MEASURED["of"], MEASURED["totals"]
    for way in nan_cause.WAYS:
        found = totals[way]
        numbers = " | ".join(str(found[key]) for key in ("right", "right with a mask", "named nothing", "false alarms"))
        assert f"| {way} | {numbers} |" in DOCS
    head = f"| right, of {of['models']} | with a mask, of {of['with a mask']} | named nothing | false alarms, of"
    assert f"{head} {of['healthy']} |" in DOCS
