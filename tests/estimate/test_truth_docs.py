"""The accuracy in docs/estimate-accuracy.md is that of benchmarks/results/truth.json."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "truth.json").read_text())
DOCS = (ROOT / "docs" / "estimate-accuracy.md").read_text()
MANUAL = (ROOT / "docs" / "estimate-memory.md").read_text()


def accuracy_table():
    lines = [
        "| | equal to the byte | within 0.5% | within 1% | median error | largest error |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in ("allocated", "reserved"):
        one = RESULTS["summary"][name]
        shares = [one["equal_pct"], one["within_half_percent_pct"], one["within_one_percent_pct"]]
        cells = [*(f"{share}%" for share in shares), f"{one['median_error_pct']}%", f"{one['largest_error_pct']}%"]
        lines.append(f"| peak {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_results():
    assert accuracy_table() in DOCS
    names = {key.split(",")[0] for key in RESULTS["cases"]}
    assert f"{RESULTS['summary']['compared']} runs of {len(names)} models" in DOCS


def test_the_goals_are_reached():
    allocated, reserved = RESULTS["summary"]["allocated"], RESULTS["summary"]["reserved"]
    assert allocated["equal_pct"] >= 90
    assert reserved["equal_pct"] >= 80
    assert allocated["within_half_percent_pct"] == reserved["within_one_percent_pct"] == 100
    assert allocated["median_error_pct"] == reserved["median_error_pct"] == 0


def test_every_larger_difference_is_named():
    for key, one in RESULTS["cases"].items():
        too_far = "error" in one or abs(one["allocated_error_pct"]) > 0.5 or abs(one["reserved_error_pct"]) > 1
        assert not too_far or one["reason"], key
        if too_far:
            assert key.split(",")[0] in DOCS, key


def test_the_table_of_the_engines_is_that_of_the_results():
    found = json.loads((ROOT / "benchmarks" / "results" / "estimate_engines.json").read_text())["processor_time"]
    for name, one in found.items():
        assert f"| {name} | {one['simulation_s']:.2f} s | {one['cuda_s']:.2f} s | {one['ratio']} |" in MANUAL
        assert one["allocated_equal"]
        assert one["reserved_equal"]
        assert one["ratio"] > 2
