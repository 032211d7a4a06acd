from __future__ import annotations

import io
import re
from html import unescape

import pytest
from markdown import markdown
from rich.console import Console

from lightning_memtools.memory.peaks import StagePeak
from lightning_memtools.memory.processes import GpuProcess
from lightning_memtools.memory.sizes import GIB, MIB
from lightning_memtools.reporting.memory_summary import MemorySummary
from lightning_memtools.reporting.tables import Table, console_table, markdown_table


def printed(what) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(what)
    return out.getvalue()


def test_a_table_as_markdown_survives_pipes_and_line_breaks():
    table = Table(["a|b", "n"], [["x\ny", "1"]])
    assert markdown_table(table) == "| a\\|b | n |\n| --- | ---: |\n| x y | 1 |"
    assert "<table>" in markdown(markdown_table(table), extensions=["tables"])


@pytest.mark.parametrize("name", ["<script>", "a*b*c", "__init__", "_orig_mod.net", "plain_name", "a|b", "`", "x<y`z"])
def test_any_name_of_a_module_shows_as_it_is(name):
    html = markdown(markdown_table(Table(["module", "n"], [[name, "1"]])), extensions=["tables"])
    (cell,) = re.findall("<td>(.*)</td>", html)
    assert unescape(cell) == name


def test_square_brackets_are_text_on_the_console():
    assert "layer[0]" in printed(console_table(Table(["[name]", "n"], [["layer[0]", "1"]])))


SUMMARY = MemorySummary(
    device="cuda:0 (H200)",
    peaks={
        "train": StagePeak(3 * GIB, 4 * GIB, {"parameters": GIB, "activations": 2 * GIB}),
        "val": StagePeak(GIB, None),
    },
    capacity=8 * GIB,
    alloc_retries=2,
    ooms=0,
    host_rss=512 * MIB,
    processes=[GpuProcess(42, "python", 3 * GIB), GpuProcess(7, "", None)],
    ranks=4,
)


def test_the_summary_says_everything_that_is_known():
    text = SUMMARY.markdown()
    for line in (
        "### Memory peaks on cuda:0 (H200), 8.00 GiB, highest of 4 ranks",
        "| train | 3.00 GiB | 4.00 GiB | 50.0% |",
        "| val | 1.00 GiB | not known |  |",
        "| activations | 2.00 GiB | 66.7% |",
        "- Host memory of this process: 512 MiB.",
        "- Allocation retries: 2; out-of-memory errors: 0.",
        "- Other processes on the device: python (pid 42, 3.00 GiB), process (pid 7, not known).",
    ):
        assert line in text, line


def test_stages_come_in_the_order_of_a_run_whichever_was_first():
    peaks = {"predict": StagePeak(4), "val": StagePeak(2), "test": StagePeak(3), "train": StagePeak(1)}
    rows = MemorySummary(device="cuda:0", peaks=peaks).stage_table().rows
    assert [row[0] for row in rows] == ["train", "val", "test", "predict"]
