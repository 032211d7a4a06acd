"""The console may be closed, broken or unable to print a character: a run goes on, and its files are written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_memtools.reporting.console import progress_printed

SCRIPT = """
import sys, time
from pathlib import Path
from lightning_memtools.reporting.console import print_on_console
{before}
print_on_console("a path: /tmp/gr\\u00f6\\u00dfe", "[bold]no markup[/bold]")
print_on_console("more " * 20000)
Path(sys.argv[1]).write_text("went on")
"""


def run(tmp_path: Path, before: str = "", shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=before))
    python = f"{sys.executable} {script} {tmp_path / 'end'}"
    done = subprocess.run(  # noqa: S602, a pipe is what is tested
        f"bash -o pipefail -c '{python} {shell}'", shell=True, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert (tmp_path / "end").read_text() == "went on"
    return done


@pytest.mark.parametrize(
    ("before", "shell"),
    [("", "| true"), ("sys.stdout.close()", ""), ("sys.stdout = None", ""), ("", "> /dev/full"), ("", ">&-")],
)
def test_a_console_that_cannot_print_does_not_end_the_program(before, shell, tmp_path):
    done = run(tmp_path, before, shell)
    assert "Traceback" not in done.stderr
    if "/dev/full" not in shell:  # Python itself complains at its exit that it cannot flush
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_characters_that_an_encoding_lacks_are_replaced(encoding, tmp_path):
    done = run(tmp_path, PYTHONIOENCODING=encoding, shell="| iconv -f " + encoding + " -t utf-8")
    path = "gr??e" if encoding == "ascii" else "größe"
    assert f"a path: /tmp/{path}\n[bold]no markup[/bold]\n" in done.stdout


def test_work_that_takes_long_says_what_it_does_and_no_more_after_its_end(capsys):
    doing, seen = "trying batches of 2", ""
    with progress_printed(lambda: f"BatchSizeTuner is {doing}", after_s=0.0, every_s=0.01):
        for doing in (doing, "trying batches of 64"):  # noqa: B020, the function above reads it
            deadline = time.monotonic() + 60
            while f"BatchSizeTuner is {doing} (" not in seen and time.monotonic() < deadline:
                seen += capsys.readouterr().out
        assert "trying batches of 64" in seen
        assert "trying batches of 2 (" in seen
    assert "memtools-progress" not in {thread.name for thread in threading.enumerate()}
    with progress_printed(lambda: "never", after_s=600):
        pass
    assert "never" not in capsys.readouterr().out
