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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools import HaltOnNaN, NonFiniteError, diagnose, dry_run, estimate_memory
from lightning_memtools.cli.main import command_parser
from tests.browser import wait_until
from tests.tensorboard_plugin.logdirs import write_small_run

ROOT = Path(__file__).parents[2]
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
def test_every_option_says_its_default(command, action):
    said = re.search(r"\(default: (.+)\)$", action.help or "")
    assert said, "the help ends with the default"
    if action.default not in {None, False}:
        assert said[1] == str(action.default)
    function = FUNCTIONS.get(command)
    known = None if function is None else inspect.signature(function).parameters.get(action.dest)
    if known is not None and known.default not in {None, False, "", "all", ()}:
        assert said[1] == str(known.default) or command == "estimate", "the function has another default"


def test_every_argument_is_described():
    for command, parser in parsers().items():
        assert all(action.help for action in parser._actions), command


class Fails(L.LightningModule):
    """Its loss is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.net(batch).exp().mean() * torch.nan

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def with_loader():
    return Slow(), torch.utils.data.DataLoader(torch.zeros(64, 4), batch_size=8)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of a step, a log directory, and a module whose steps never end."""
    folder = tmp_path_factory.mktemp("failed")
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    rows: Any = torch.zeros(64, 4)
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    with warnings.catch_warnings(), contextlib.suppress(NonFiniteError):
        warnings.simplefilter("ignore")
        halt = HaltOnNaN(directory=str(folder / "nan"), explain=False)
        L.Trainer(max_epochs=1, callbacks=[halt], enable_checkpointing=False, **quiet).fit(Fails(), data)
    write_small_run(folder / "logs")
    (folder / "slow.py").write_text(SLOW)
    for pipe in ("ready", "page.html", "snapshot.pickle"):
        os.mkfifo(folder / pipe)
    return folder


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


def reach(process: subprocess.Popen[str], pipe: Path, mode: int) -> int:
    """Wait until the process has come to the pipe and waits at its other end; return this end."""
    ends: list[int] = []

    def is_reached() -> bool:
        assert process.poll() is None, "it ended before"
        with contextlib.suppress(OSError):  # nobody reads it yet; nobody has written to it yet
            if not ends:
                ends.append(os.open(pipe, mode | os.O_NONBLOCK))
            return mode == os.O_WRONLY or len(os.read(ends[0], 1)) > 0
        return False

    assert wait_until(is_reached, 300)
    return ends[0]


AT_WORK = {
    "estimate": ("The step is traced", "slow:with_batch", "--engine", "simulation"),
    "doctor": ("The first steps are run", "slow:with_loader"),
    "replay": ("The step is run again", "STEP", "--model", "slow:Slow"),
    "report": ("The page is written", "logs", "--output", "page.html"),
    "snapshot": ("The snapshot is read", "snapshot.pickle"),
    "diff": ("The results are read", "snapshot.pickle", "snapshot.pickle"),
}
"""tests/null_cuda/test_dry_run.py does the same with a dry run."""


@pytest.mark.parametrize("command", AT_WORK)
def test_a_command_says_what_it_does_and_ends_with_one_line_after_ctrl_c(command, failed):
    doing, *arguments = AT_WORK[command]
    files = {"STEP": next(failed.glob("nan/*rank0.pt"))}
    read = "snapshot.pickle", os.O_WRONLY
    pipe, mode = {"report": ("page.html", os.O_RDONLY), "snapshot": read, "diff": read}.get(
        command, ("ready", os.O_RDONLY)
    )
    with started(failed, command, *(str(files.get(one, one)) for one in arguments)) as (process, terminal):
        end = reach(process, failed / pipe, mode)
        assert wait_until(lambda: doing in terminal.text), terminal.text
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
        os.close(end)
    shown = terminal.end()
    assert (process.returncode, printed) == (130, "")
    assert shown.rstrip().splitlines()[-1].strip() == "memtools: interrupted"
    assert "Traceback" not in shown


def test_every_command_is_interrupted_here_or_in_the_dry_run_s_tests():
    assert {*AT_WORK, "dry-run", "plan"} == parsers().keys()  # both end a script in the same function
