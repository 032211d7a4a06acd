"""Two ranks and a fault: nothing hangs or fails with our callbacks that does not without them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration import faults_run
from tests.integration.faults_run import FAULTS, LIMIT_S
from tests.two_processes import run_script

# Two processes for each of 19 faults, with and without us: some minutes.
pytestmark = pytest.mark.skipif("MEMTOOLS_FAULTS" not in os.environ, reason="takes minutes: set MEMTOOLS_FAULTS=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    run_script(Path(faults_run.__file__), root, timeout_s=2 * len(FAULTS) * LIMIT_S)
    return root


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rank_ends_as_it_does_without_our_callbacks(fault, folder):
    seen = json.loads((folder / "seen.json").read_text())[fault]
    for rank in (0, 1):
        without, ours = seen["without"]["exit"][rank], seen["with"]["exit"][rank]
        said = (folder / fault / "with" / f"rank{rank}.txt").read_text()
        assert (ours is None, ours == 0) == (without is None, without == 0), f"{seen}\n{said}"
        assert seen["with"]["seconds"][rank] < seen["without"]["seconds"][rank] + 30, f"{seen}\n{said}"


def test_a_rank_that_raises_fails_with_its_own_error(folder):
    for fault in (fault for fault in FAULTS if fault.startswith("raises")):
        said = (folder / fault / "with" / "rank1.txt").read_text()
        assert said.rstrip().endswith("FaultError: from the user's code"), said


def test_a_late_rank_is_named_once_and_counts_with_its_last_point(folder):
    for fault in ("slow_at_test_end", "fewer_validation_batches"):
        table = (folder / fault / "with" / "logs" / "memtools" / "memory_summary_test.md").read_text()
        assert "highest of 2 ranks" in table
    said = (folder / "slow_at_test_end" / "with" / "rank0.txt").read_text()
    assert said.count("MemoryMonitor: the values of rank 1 for the end of the run have not arrived") == 1
