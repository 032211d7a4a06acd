"""Two real processes on the CPU: one runs out of memory, both end, and both say which one it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.event_files import texts_of
from tests.integration import oom_on_ranks

SCRIPT = Path(oom_on_ranks.__file__)


@pytest.mark.parametrize("culprit", [0, 1])
def test_all_ranks_end_and_name_the_one_that_ran_out(culprit, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    begin = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(culprit)],
            env=environment | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - begin < 60
    assert [process.returncode for process in ranks] == [1, 1]

    report = tmp_path / "board" / "memtools" / f"oom-train-step2-rank{culprit}.md"
    headline = f"(train, step 2, batch 2, forward, rank {culprit} of 2): 80.0 MiB were asked for"
    # The culprit ends with its own error, which has the report's first lines.
    out, err = said[culprit]
    assert "torch.OutOfMemoryError: CUDA out of memory" in err
    assert headline in err
    assert str(report) in err
    assert headline in out
    # The other one sees a closed connection, and says what that came from.
    out, err = said[1 - culprit]
    assert "torch.OutOfMemoryError" not in err
    assert f"OOMReport: rank {culprit} ran out of memory, and this error is what came of it here." in err
    assert headline in err
    assert str(report) in err
    assert headline in report.read_text()
    assert [path.name for path in tmp_path.rglob("oom-*.md")] == [report.name]
    # Rank 0 has the loggers, whichever rank it was.
    (text,) = texts_of(tmp_path / "board")["memtools/oom_report"]
    assert headline in text
