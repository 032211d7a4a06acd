from __future__ import annotations

from pathlib import Path

from tests.two_processes import run_ranks


def test_two_ranks_gather_and_stop_waiting_for_an_absent_one(tmp_path):
    ranks = run_ranks(Path(__file__).parent / "ranks_run.py", tmp_path / "store", timeout_s=100)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert "gave up" in ranks[1].stdout
