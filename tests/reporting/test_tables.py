from __future__ import annotations

import io
import re
from html import unescape

import pytest
from markdown import markdown
from rich.console import Console

from lightning_memtools.memory.peaks import StagePeak
from lightning_memtools.memory.sizes import GIB
from lightning_memtools.reporting.memory_run import MemorySummary
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


def test_the_summary_has_the_stages_in_the_order_of_a_run_and_the_parts_of_the_highest_peak():
    peaks = {
        "val": StagePeak(GIB, None),
        "train": StagePeak(3 * GIB, 4 * GIB, {"parameters": GIB, "inputs": 0, "activations": 2 * GIB}),
    }
    assert (
        MemorySummary("Memory peaks on cuda:0", peaks, 8 * GIB, ["a", "b"]).markdown()
        == """\
### Memory peaks on cuda:0

| stage | peak allocated | peak reserved | of device |
| --- | ---: | ---: | ---: |
| train | 3.00 GiB | 4.00 GiB | 50.0% |
| val | 1.00 GiB | not known |  |

| at the highest peak | size | share |
| --- | ---: | ---: |
| activations | 2.00 GiB | 66.7% |
| parameters | 1.00 GiB | 33.3% |

- a
- b
"""
    )
