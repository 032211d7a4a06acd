"""The accuracy in the manual is that of benchmarks/results/truth.json, and truth_virtual_device.json."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "truth.json").read_text())
DOCS = (ROOT / "docs" / "estimate-accuracy.md").read_text()
MANUAL = (ROOT / "docs" / "estimate-memory.md").read_text()
ON_CPU = json.loads((ROOT / "benchmarks" / "results" / "truth_virtual_device.json").read_text())
DOCS_ON_CPU = (ROOT / "docs" / "virtual-device.md").read_text()


def accuracy_table(summary):
    lines = [
        "| | equal to the byte | within 0.5% | within 1% | median error | largest error |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in ("allocated", "reserved"):
        one = summary[name]
        shares = [one["equal_pct"], one["within_half_percent_pct"], one["within_one_percent_pct"]]
        cells = [*(f"{share}%" for share in shares), f"{one['median_error_pct']}%", f"{one['largest_error_pct']}%"]
        lines.append(f"| peak {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_results():
    for results, docs in ((RESULTS, DOCS), (ON_CPU, DOCS_ON_CPU)):
        assert accuracy_table(results["summary"]) in docs
        names = {key.split(",")[0] for key in results["cases"]}
        assert f"{results['summary']['compared']} runs of {len(names)} models" in docs


def test_the_goals_are_reached():
    allocated, reserved = RESULTS["summary"]["allocated"], RESULTS["summary"]["reserved"]
    assert allocated["equal_pct"] >= 90
    assert reserved["equal_pct"] >= 80
    assert allocated["within_half_percent_pct"] == reserved["within_one_percent_pct"] == 100
    assert allocated["median_error_pct"] == reserved["median_error_pct"] == 0


def is_different(one):
    return "error" in one or any(one["real"][name] != one["estimated"][name] for name in one["real"])


def test_every_difference_is_named_with_its_cause():
    different = {key: one for key, one in RESULTS["cases"].items() if is_different(one)}
    assert different
    for key, one in different.items():
        (line,) = [line for line in DOCS.splitlines() if line.startswith(f"- {key}: ")]
        assert line.endswith(f"{one['reason']}."), key


def test_the_table_of_the_engines_is_that_of_the_results():
    found = json.loads((ROOT / "benchmarks" / "results" / "estimate_engines.json").read_text())["processor_time"]
    for name, one in found.items():
        assert f"| {name} | {one['simulation_s']:.2f} s | {one['cuda_s']:.2f} s | {one['ratio']} |" in MANUAL
        assert one["allocated_equal"]
        assert one["reserved_equal"]
    ratios = [one["ratio"] for one in found.values()]
    assert f"takes {min(ratios)} to {max(ratios)} times as long" in MANUAL


def test_a_virtual_device_reaches_the_same_goals_in_the_cases_that_are_equal():
    assert ON_CPU["summary"]["allocated"]["equal_pct"] >= 90
    assert ON_CPU["summary"]["reserved"]["equal_pct"] >= 80


def test_every_difference_of_a_virtual_device_has_a_cause_that_the_manual_names():
    different: dict[str, list[float]] = {}
    for key, one in ON_CPU["cases"].items():
        if is_different(one):
            assert one["reason"], key
            different.setdefault(one["reason"], []).append(one.get("allocated_error_pct", 0.0))
    for reason, errors in different.items():
        assert f"| {reason} | {len(errors)} | {min(errors):+.2f}% to {max(errors):+.2f}% |" in DOCS_ON_CPU, reason
