"""The tutorial, docs/index.md, as its reader types it; and then its runs on a TensorBoard server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import get, tensorboard
from tests.integration.shown_outputs import not_printed

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(python|bash|text)\n(.*?)```", (ROOT / "docs/index.md").read_text("utf-8"), re.DOTALL)
LAST_RUN = "version_4"


def typed(command: str, folder: Path) -> str:
    """Run a command of the page, and return what it printed and how it ended."""
    program, *words = shlex.split(command)
    start = {"python": [], "memtools": ["-m", "lightning_memtools"]}[program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(folder)])
    done = subprocess.run(
        [sys.executable, *start, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    return f"{done.stdout}\n{done.stderr}\nexit {done.returncode}"


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The reader's folder; each command with what it printed; and for each what the page shows of that."""
    folder = tmp_path_factory.mktemp("tutorial")
    script = folder / "digits.py"
    printed: list[tuple[str, str]] = []
    shown: list[str] = []
    for language, text in BLOCKS:
        if language == "python" and not script.exists():
            script.write_text(text)
        elif language == "python":  # a line that takes the place of the one that begins like it
            old = next(line for line in script.read_text().splitlines(keepends=True) if line.startswith(text[:30]))
            script.write_text(script.read_text().replace(old, text))
        elif language == "text":
            shown[-1] += text
        elif text.startswith(("python", "memtools")):
            printed.append((text, typed(text, folder)))
            shown.append("")
    return folder, printed, shown


def test_every_command_prints_what_the_page_shows(read):
    _, printed, shown = read
    assert all(shown)
    for (command, said), lines in zip(printed, shown, strict=True):
        assert not_printed(lines, said) == [], f"{command}{said}"


def test_two_runs_fail_and_every_other_command_succeeds(read):
    assert [said.rsplit(maxsplit=1)[1] for _, said in read[1]] == ["0", "1", "0", "1", "0", "0", "0"]


def test_the_network_learns(read):
    accuracy = re.search(r"accuracy: ([\d.]+)%", read[1][-1][1])
    assert float(accuracy[1]) >= 90


def test_it_is_the_script_of_the_examples_and_make_demo_types_the_same_commands(read):
    (_, script), *_ = [block for block in BLOCKS if block[0] == "python"]
    assert script == (ROOT / "examples" / "digits.py").read_text("utf-8")
    demo = (ROOT / "Makefile").read_text("utf-8").split("\ndemo:")[1].split("\n\n")[0]
    typed_there = re.findall(r"^\t\t(?:! )?((?:python|memtools) .*?)(?:; \\)?$", demo, re.MULTILINE)
    bad_step = re.search(r"^BAD_STEP := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1]
    assert [line.replace("$(BAD_STEP)", bad_step) for line in typed_there] == [line.strip() for line, _ in read[1]]


@pytest.fixture(scope="module")
def board(read, tmp_path_factory):
    """The address of a TensorBoard server over the tutorial's logs."""
    with tensorboard(read[0] / "lightning_logs", tmp_path_factory.mktemp("server") / "output") as address:
        yield address


def test_the_tab_opens_at_the_run_that_went_to_the_end(board):
    assert get(board, "plugin/lightning_memtools/runs")["newest"] == LAST_RUN


def test_the_server_offers_every_tag_of_the_design(board):
    tags = set(get(board, "plugin/scalars/tags")[LAST_RUN])
    expected = {"loss/train", "loss/val", "memory/capacity_gib", "memory/device_used_gib", "memory/host_rss_gib",
                "memory/alloc_retries", "memory/ooms", "time/step_ms"}  # fmt: skip
    for stage in ("train", "val"):
        expected |= {f"memory/{stage}/{figure}" for figure in (
            "allocated_gib", "reserved_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_used_pct",
            "fragmentation_pct")}  # fmt: skip
    categories = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
    expected |= {f"memory/composition/{category}_gib" for category in categories}
    assert expected <= tags


def test_the_server_offers_the_summary_as_a_table(board):
    tag = "memtools/memory_summary/text_summary"
    assert set(get(board, "plugin/text/tags")[LAST_RUN]) - {"memtools/doctor/text_summary"} == {tag}
    (entry,) = get(board, "plugin/text/text", run=LAST_RUN, tag=tag)
    assert "<table>" in entry["text"]
    assert "simulated" in entry["text"]
