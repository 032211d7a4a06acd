"""Two ranks and a fault: nothing hangs or fails with our callbacks that does not without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import faults_run
from tests.integration.faults_run import EVERY, FAULTS, LIMIT_S
from tests.two_processes import run_script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    run_script(Path(faults_run.__file__), root, timeout_s=len(FAULTS) * sum(LIMIT_S.values()))
    return root


LATER_S = {"with": 30, "every": 60}
"""A run may end so much later than without our callbacks. Searching a batch size takes time of its own."""


def ended_alike(one: list[int | None], other: list[int | None]) -> bool:
    return [(code is None, code == 0) for code in one] == [(code is None, code == 0) for code in other]


RUNS = [(fault, "with") for fault in FAULTS] + [(fault, "every") for fault in EVERY]


@pytest.mark.parametrize(("fault", "kind"), RUNS)
def test_each_rank_ends_as_it_does_without_our_callbacks(fault, kind, folder):
    seen = json.loads((folder / "seen.json").read_text())[fault]
    said = "\n".join((folder / fault / kind / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert ended_alike(seen[kind]["exit"], seen["without"]["exit"]), f"{seen}\n{said}"
    for rank in (0, 1):
        assert seen[kind]["seconds"][rank] < seen["without"]["seconds"][rank] + LATER_S[kind], f"{seen}\n{said}"


def test_all_callbacks_together_did_their_work_before_the_fault(folder):
    reports = folder / "none" / "every" / "logs" / "memtools"
    assert "train 8 (in 1 trial," in (reports / "batch_size.md").read_text()
    assert "Nothing is recomputed" not in (reports / "checkpoint_plan.md").read_text()


def test_a_rank_that_raises_fails_with_its_own_error(folder):
    for fault in (fault for fault in FAULTS if fault.startswith("raises")):
        said = (folder / fault / "with" / "rank1.txt").read_text()
        assert said.rstrip().endswith("FaultError: from the user's code"), said


def test_a_late_rank_is_named_once_and_counts_with_its_last_point(folder):
    for fault in ("slow_at_test_end", "fewer_validation_batches"):
        table = (folder / fault / "with" / "logs" / "memtools" / "memory_summary_test.md").read_text()
        assert "highest of 2 ranks" in table
    said = (folder / "slow_at_test_end" / "with" / "rank0.txt").read_text()
    assert said.count("the values of rank 1") == 1
