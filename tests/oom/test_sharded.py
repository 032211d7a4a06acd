"""A report on a step of a model that FSDP 2 shards, on both ranks, with the peaks of real runs that follow it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_memtools.memory.sizes import parse_size
from tests.oom import sharded_run
from tests.two_processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    for result in run_ranks(Path(sharded_run.__file__), root, timeout_s=300):
        assert result.returncode == 0, result.stdout + result.stderr
    return root


def report_of(folder, rank):
    (page,) = (folder / str(rank)).glob("oom-*.md")
    return page.read_text()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("change", "code"), [("recomputed", "GradientCheckpointing()"), ("half", "batch_size=1024)`).")]
)
def test_a_peak_falls_on_each_rank_by_about_what_the_report_says(folder, rank, change, code):
    (line,) = (line for line in report_of(folder, rank).splitlines() if code in line)
    said = parse_size(re.search(r"peak falls by ([\d.]+ \w+) to", line)[1].replace(" ", ""))
    peaks = json.loads((folder / f"{rank}.json").read_text())
    fell = peaks["plain"] - peaks[change]
    # In the trace, the whole model's gradients take over the peak sooner. On a rank, how long the parameters gathered
    # for a block (1 MiB) live depends on when the other rank answers.
    assert 0.94 * said <= fell <= 1.2 * said


def test_what_ranks_share_is_no_advice_and_what_they_gathered_has_no_holder(folder):
    report = report_of(folder, 0)
    advice = report.partition("## What happened")[0]
    assert "GradientCheckpointing()" in advice
    assert not re.search(r"SGD|bf16|larger GPU|Delete or detach", advice)
    assert "## Who holds the rest" not in report
