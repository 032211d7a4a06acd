"""Runs a script as its users do, in a process of its own, which starts the other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def run_script(script: Path, *arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a Python script of the tests and return what it said; fails if it takes longer or ends badly."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # everything stays on this machine
    }
    result = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, f"{script.name} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result
