"""The committed cost of TrainingDoctor; benchmarks/doctor.py measures it anew."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks/results/doctor.json").read_text("utf-8"))


def test_watched_steps_take_at_most_a_tenth_longer():
    assert MEASURED["watched"]["ratio_of_medians"] < MEASURED["watched"]["target"] == 1.1
    assert MEASURED["all_watched_steps_with_the_first"]["ratio"] < 1.1


def test_the_page_has_the_measured_ratios():
    page = (ROOT / "docs/training-doctor.md").read_text("utf-8")
    assert f"{MEASURED['watched']['ratio_of_medians']:.2f} times" in page
    assert f"{MEASURED['all_watched_steps_with_the_first']['ratio']:.2f} times" in page
