"""Two ranks and a fault: nothing hangs or fails with our callbacks that does not without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import faults_run
from tests.integration.faults_run import FAULTS, IN_CI, LIMIT_S
from tests.two_processes import run_script

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    run_script(Path(faults_run.__file__), root, *IN_CI, timeout_s=len(IN_CI) * LIMIT_S)
    return root


def ended_alike(one: list[int | None], other: list[int | None]) -> bool:
    return [(code is None, code == 0) for code in one] == [(code is None, code == 0) for code in other]


@pytest.mark.parametrize("fault", IN_CI)
def test_each_rank_ends_as_it_does_without_our_callbacks(fault, folder):
    seen = json.loads((folder / "seen.json").read_text())[fault]
    said = "\n".join((folder / fault / "with" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert ended_alike(seen["with"]["exit"], seen["without"]["exit"]), f"{seen}\n{said}"
    for rank in (0, 1):
        assert seen["with"]["seconds"][rank] < seen["without"]["seconds"][rank] + 30, f"{seen}\n{said}"


def test_a_rank_that_raises_fails_with_its_own_error(folder):
    for fault in (fault for fault in IN_CI if fault.startswith("raises")):
        said = (folder / fault / "with" / "rank1.txt").read_text()
        assert said.rstrip().endswith("FaultError: from the user's code"), said


def test_a_late_rank_is_named_once_and_counts_with_its_last_point(folder):
    for fault in ("slow_at_test_end", "fewer_validation_batches"):
        table = (folder / fault / "with" / "logs" / "memtools" / "memory_summary_test.md").read_text()
        assert "highest of 2 ranks" in table
    said = (folder / "slow_at_test_end" / "with" / "rank0.txt").read_text()
    assert said.count("MemoryMonitor: the values of rank 1 for the end of the run have not arrived") == 1


def test_the_committed_faults_end_as_without_our_callbacks():
    committed = json.loads(RESULTS.read_text())["faults"]
    assert set(IN_CI) <= set(committed) <= set(FAULTS)
    for seen in committed.values():
        assert ended_alike(seen["with"]["exit"], seen["without"]["exit"]), seen
        assert max(seen["with"]["seconds"]) < max(seen["without"]["seconds"]) + 30, seen
