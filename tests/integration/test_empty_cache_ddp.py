"""EmptyCache on two ranks: each decides for itself, and none waits for the other."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.two_processes import run_script


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder that a run on two ranks left behind."""
    root = tmp_path_factory.mktemp("empty_cache_ddp")
    run_script(Path(__file__).with_name("empty_cache_ddp_run.py"), root)
    return root


def left_by(root, rank):
    return json.loads((root / f"rank{rank}.json").read_text())


def test_each_rank_gives_back_what_is_worth_it_there(root):
    # One validation batch per epoch and rank. Rank 0 keeps its 10 MiB of training: not worth it. Rank 1 gives 100 back.
    small = left_by(root, 1)["reserved_mib"][0]
    assert left_by(root, 0)["reserved_mib"] == [small + 10] * 3
    assert left_by(root, 1)["reserved_mib"] == [small] * 3
    assert small < 10


def test_only_the_rank_that_leaks_warns_and_says_which_it_is(root):
    assert left_by(root, 0)["warnings"] == []
    (text,) = left_by(root, 1)["warnings"]
    assert "of rank 1" in text
    assert "Uneven.outputs (a list of 3;" in text


def test_both_ranks_end_with_the_same_weights(root):
    assert left_by(root, 0)["weights"] == left_by(root, 1)["weights"]


def test_rank_zero_writes_its_own_figures(root):
    (file,) = root.rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    freed = [float(row["memory/cache/freed_gib"]) for row in rows if row["memory/cache/freed_gib"]]
    assert freed == [0.0] * 9  # three epochs with two boundaries each, fit's end, and the test's two
