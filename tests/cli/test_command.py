"""The command `memtools` as a whole: its version and its pages of help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_memtools
from lightning_memtools.cli.main import command_parser

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def memtools(*arguments):
    line = [sys.executable, "-m", "lightning_memtools", *arguments]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_the_module_is_the_command_and_tells_its_version():
    assert memtools("--version").stdout == f"lightning_memtools {lightning_memtools.__version__}\n"


def test_without_arguments_it_shows_its_commands():
    done = memtools()
    assert done.returncode == 2
    assert "the memory of a training step" in done.stderr


def test_every_page_of_help_fits_a_screen_of_24_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    commands = command_parser()._subparsers._group_actions[0].choices
    assert {"estimate", "plan", "dry-run", "diff", "doctor", "replay", "report", "snapshot"} <= set(commands)
    for command in ([], *([name] for name in commands)):
        with pytest.raises(SystemExit):
            command_parser().parse_args([*command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24, command
        assert max(map(len, lines)) <= 80, command


def test_every_option_of_every_command_is_described_and_stands_in_the_manual():
    page = (ROOT / "docs/command-line.md").read_text()
    commands = re.findall(r"^    ([a-z-]+) ", memtools("--help").stdout, flags=re.MULTILINE)
    assert {"estimate", "doctor", "replay", "dry-run", "report"} <= set(commands)
    for command in commands:
        assert f"## memtools {command}" in page
        text = memtools(command, "--help").stdout
        part = page.split(f"## memtools {command}\n")[1].split("\n## ")[0]
        for option, rest in re.findall(r"^  (?:-\w[ \w.]*, )?(-[-\w]+)(.*(?:\n {10,}.*)*)", text, flags=re.MULTILINE):
            words = re.sub(r"^( [A-Z][\w.]*| \{.*?\}|, --\w+.*?(?=  |\n)| \[.*?\])*", "", rest).split()
            assert words, f"memtools {command} {option} has no description"
            assert option in {"-h", "--help"} or f"`{option}" in part or f", {option}" in part, f"{command} {option}"


BROKEN = """
import torch

def made():
    raise KeyError("my own mistake")

def step(model, batch):
    return (model(batch) @ torch.zeros(7, 3)).sum()

def ran():
    return torch.nn.Linear(4, 4), torch.zeros(2, 4), step
"""


@pytest.mark.parametrize(
    ("module", "function", "last"),
    [
        (BROKEN, "made", "raise KeyError(\"my own mistake\")\nKeyError: 'my own mistake'"),
        (BROKEN, "ran", "RuntimeError: a and b must have same reduction dim, but got [2, 4] X [7, 3]."),
        ("def made(:", "made", "SyntaxError: invalid syntax"),
    ],
    ids=["made", "ran", "syntax"],
)
def test_an_error_of_the_users_code_is_shown_without_our_internals(module, function, last, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(module)
    done = memtools("estimate", f"broken:{function}")
    assert done.returncode == 1
    places = re.findall(r'^  File "(.*?)"', done.stderr, flags=re.MULTILINE)
    assert places
    assert {Path(place).name for place in places} == {"broken.py"}
    assert re.sub(r"\n +", "\n", done.stderr).strip().endswith(last)
