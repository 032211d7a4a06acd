"""Two ranks on the CPU over gloo, as a user's script starts them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.event_files import scalars
from tests.two_processes import run_script


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder that a run on two ranks left behind."""
    root = tmp_path_factory.mktemp("ddp")
    result = run_script(Path(__file__).with_name("ddp_run.py"), root)
    (root / "stdout").write_text(result.stdout)
    return root


def test_rank_zero_alone_writes(root):
    writers = {path.name.split(".")[-2] for path in root.rglob("*.tfevents.*")}  # the process id is in the name
    assert len(writers) == 1
    assert len([*root.rglob("metrics.csv")]) == 1
    assert sorted(path.name for path in root.rglob("memtools/*")) == [
        "memory_summary_fit.md",
        "memory_summary_test.md",
    ]
    assert (root / "stdout").read_text().count("highest of 2 ranks") == 2  # one block each for fit and test


def test_losses_are_means_over_both_ranks(root):
    ranks = [json.loads((root / f"losses{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] != ranks[1]
    curves = scalars(root / "board")
    both = [(a + b) / 2 for a, b in zip(ranks[0]["train"], ranks[1]["train"], strict=True)]
    assert len(both) == 3
    assert curves["loss/train"] == [
        (1, pytest.approx((both[0] + both[1]) / 2, rel=1e-5)),
        (2, pytest.approx(both[2], rel=1e-5)),
    ]
    val = [loss for rank in ranks for loss in rank["val"]]
    assert curves["loss/val"] == [(2, pytest.approx(sum(val) / len(val), rel=1e-5))]
    assert len(curves["grad/norm"]) == 2


def test_every_rank_is_logged_and_the_plain_tag_is_the_maximum(root):
    curves = scalars(root / "board")
    by_rank = [curves[f"memory/host_rss_gib/rank{rank}"] for rank in (0, 1)]
    for whole, first, second in zip(curves["memory/host_rss_gib"], *by_rank, strict=False):
        assert whole == (first[0], max(first[1], second[1]))
    assert by_rank[0] != by_rank[1]


def test_the_other_logger_holds_the_same(root):
    (file,) = root.rglob("metrics.csv")
    rows = [*csv.DictReader(file.read_text().splitlines())]
    table = [(int(row["step"]), float(row["loss/train"])) for row in rows if row.get("loss/train")]
    assert table == [(step, pytest.approx(value, rel=1e-5)) for step, value in scalars(root / "board")["loss/train"]]
