"""What each command says before, while and after it works: defaults, progress, and one line after Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_memtools import diagnose, dry_run, estimate_memory
from lightning_memtools.cli.main import command_parser
from tests.browser import wait_until

FUNCTIONS = {"estimate": estimate_memory, "doctor": diagnose, "dry-run": dry_run}


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (one for one in command_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(commands.choices)


OPTIONS = [
    pytest.param(command, action, id=f"{command} {action.option_strings[-1]}")
    for command, parser in parsers().items()
    for action in parser._actions
    if action.option_strings and action.dest != "help"
]


@pytest.mark.parametrize(("command", "action"), OPTIONS)
def test_every_option_says_the_value_that_it_has_by_default(command, action):
    function = FUNCTIONS.get(command)
    known = None if function is None else inspect.signature(function).parameters.get(action.dest)
    default = action.default if known is None or action.default not in {None, False} else known.default
    if default not in {None, False, "", "all", ()}:
        said = re.search(r"\(default: (.+?)\)", action.help or "")
        assert said, "the help names the default"
        assert said[1] == str(default) or command == "estimate", "the function has another default"


SLOW = """
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch


class Slow(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        Path("ready").write_text("the step has begun")  # waits for a reader
        time.sleep(600)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_batch():
    return Slow(), torch.zeros(8, 4)

"""


class Terminal:
    """What a process shows on its standard error, which is a terminal."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self.ours, 4096):
                self.text += part.decode()

    def end(self) -> str:
        self._reader.join()
        os.close(self.ours)
        return re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", self.text)


@contextlib.contextmanager
def started(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], Terminal]]:
    """Start `memtools` with its errors on a terminal; it does not outlive the block."""
    terminal = Terminal()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_memtools", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal.theirs,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    os.close(terminal.theirs)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()


def reach(process: subprocess.Popen[str], pipe: Path) -> int:
    """Wait until the process writes to the pipe; return the end that it waits for."""
    ends: list[int] = []

    def is_reached() -> bool:
        assert process.poll() is None, "it ended before"
        with contextlib.suppress(OSError):  # nobody has written to it yet
            if not ends:
                ends.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
            return len(os.read(ends[0], 1)) > 0
        return False

    assert wait_until(is_reached, 300)
    return ends[0]


def test_a_command_says_what_it_does_and_ends_with_one_line_after_ctrl_c(tmp_path):
    """The others end in the same function; tests/null_cuda/test_dry_run.py does the same with a dry run."""
    (tmp_path / "slow.py").write_text(SLOW)
    os.mkfifo(tmp_path / "ready")
    with started(tmp_path, "estimate", "slow:with_batch") as (process, terminal):
        end = reach(process, tmp_path / "ready")
        assert wait_until(lambda: "The step is traced" in terminal.text), terminal.text
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
        os.close(end)
    shown = terminal.end()
    assert (process.returncode, printed) == (130, "")
    assert shown.rstrip().splitlines()[-1].strip() == "memtools: interrupted"
    assert "Traceback" not in shown
