"""Runs a script as its users do, in a process of its own, which starts the other ranks; or both ranks by themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def run_script(script: Path, *arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a Python script of the tests and return what it said; fails if it takes longer or ends badly."""
    result = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_environment(),
        check=False,
    )
    assert result.returncode == 0, f"{script.name} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result


def run_ranks(script: Path, *arguments: object, timeout_s: float) -> list[subprocess.CompletedProcess[str]]:
    """Start a script as both ranks of two, as a cluster would, and return how each ended; neither outlives the call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = _environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(script), *map(str, arguments)]
    with ExitStack() as started:
        ranks = [
            started.enter_context(
                subprocess.Popen(
                    command,
                    env=environment | {"LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in (0, 1)
        ]
        try:
            said = [process.communicate(timeout=timeout_s) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, out, err)
        for process, (out, err) in zip(ranks, said, strict=True)
    ]


def seen_by_ranks(script: Path, folder: Path, *arguments: object, timeout_s: float) -> list[Any]:
    """Run both ranks, which have to end well, and return what each of them left in rank0.json or rank1.json."""
    ranks = run_ranks(script, folder, *arguments, timeout_s=timeout_s)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stdout + rank.stderr for rank in ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # everything stays on this machine
    }
