"""Two real processes on the CPU: one runs out of memory, both end, and the one has its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import oom_on_ranks
from tests.two_processes import run_ranks

SCRIPT = Path(oom_on_ranks.__file__)


@pytest.mark.parametrize("culprit", [0, 1])
def test_all_ranks_end_and_the_one_that_ran_out_has_its_report(culprit, tmp_path):
    # A rank that waited for the other one would wait for half an hour, the limit of the process group.
    ranks = run_ranks(SCRIPT, tmp_path, culprit, timeout_s=300)
    assert [rank.returncode for rank in ranks] == [1, 1], "\n".join(rank.stderr for rank in ranks)

    report = tmp_path / "board" / "memtools" / f"oom-train-step2-rank{culprit}.md"
    headline = f"(train, step 2, batch 2, forward, rank {culprit} of 2): tried to allocate 80.0 MiB"
    # The culprit ends with its own error, which has the report's first lines.
    out, err = ranks[culprit].stdout, ranks[culprit].stderr
    assert "torch.OutOfMemoryError: CUDA out of memory" in err
    assert headline in err
    assert str(report) in err
    assert headline in out
    # The other one sees a closed connection.
    assert "torch.OutOfMemoryError" not in ranks[1 - culprit].stderr
    assert headline in report.read_text()
    assert [path.name for path in tmp_path.rglob("oom-*.md")] == [report.name]
