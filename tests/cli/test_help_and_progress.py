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

import torch


def step(model, batch):
    Path("begun").write_text("the step has begun")
    time.sleep(600)


def with_batch():
    return torch.nn.Linear(4, 1), torch.zeros(8, 4), step
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


def test_a_command_says_what_it_does_and_ends_with_one_line_after_ctrl_c(tmp_path):
    """The others end in the same function; tests/null_cuda/test_dry_run.py does the same with a dry run."""
    (tmp_path / "slow.py").write_text(SLOW)
    with started(tmp_path, "estimate", "slow:with_batch") as (process, terminal):
        assert wait_until((tmp_path / "begun").exists, 300), terminal.text
        assert wait_until(lambda: "The step is traced" in terminal.text), terminal.text
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    shown = terminal.end()
    assert (process.returncode, printed) == (130, "")
    assert shown.rstrip().splitlines()[-1].strip() == "memtools: interrupted"
    assert "Traceback" not in shown
