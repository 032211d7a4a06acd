"""Trainers of `lightning` and of `pytorch_lightning` get the same from the callbacks; mixing them raises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.two_processes import run_script

RUNS = [
    ("lightning.pytorch", "lightning.pytorch"),
    ("pytorch_lightning", "pytorch_lightning"),
    ("lightning.pytorch", "pytorch_lightning"),
    ("pytorch_lightning", "lightning.pytorch"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    found = {}
    for package, first in RUNS:
        root = tmp_path_factory.mktemp("run")
        script = Path(__file__).with_name("either_lightning_run.py")
        run_script(script, package, first, root)  # which imports one of them first
        found[package, first] = json.loads((root / "seen.json").read_text())
    return found


@pytest.fixture
def pair(seen):
    return seen[RUNS[1]], seen[RUNS[0]]


def test_default_callbacks_write_the_same_files_and_curves(pair):
    other, lightnings = pair
    assert other["default_run"] == lightnings["default_run"]
    assert "memory_summary_fit.md" in other["default_run"]["files"]
    assert "memory/train/peak_allocated_gib" in other["default_run"]["columns"]


def test_the_tuner_finds_the_same_size_in_a_combined_loader_and_as_a_function(pair):
    other, lightnings = pair
    assert other["tuned"] == lightnings["tuned"]
    assert other["tuned"]["size"] == other["tuned"]["function"] == 64


def test_checkpointing_makes_the_same_plan(pair):
    other, lightnings = pair
    assert other["checkpointed"] == lightnings["checkpointed"]
    assert "Recompute " in other["checkpointed"]["plan"]


def test_the_report_on_memory_has_no_check_that_failed(pair):
    page = pair[0]["out_of_memory"]["page"]
    assert "AssertionError" not in page
    # A check that a busy machine did not reach is no failure.
    assert re.search(r"Not checked: .*\(\w+(Error|Exception)", page) is None
    assert re.search(r"## What to do\n\n1\. \w+", page), page


def test_its_own_cli_takes_our_class_path(pair):
    assert pair[0]["from_yaml"]["callbacks"] == ["MemoryMonitor"]


def test_only_the_package_of_the_program_is_imported(seen):
    assert not seen[RUNS[0]]["imported_the_other"]


@pytest.mark.parametrize(("package", "first"), RUNS[2:])
def test_a_program_that_mixes_both_is_told_so_by_every_callback(seen, package, first):
    errors = seen[package, first]["errors"]
    assert len(errors) == 11
    for name, error in errors.items():
        assert f"is of {package}, but lightning_memtools works with {first}" in error, name
