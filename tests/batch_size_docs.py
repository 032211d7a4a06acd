"""The pages of BatchSizeTuner: the example and the table of measurements. Run as a program, it updates the table.

python -m tests.batch_size_docs
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "batch-size-compared.md"
MANUAL = ROOT / "docs" / "batch-size.md"
RESULTS = ROOT / "benchmarks" / "results" / "batch_size.json"
TOOLS = ("BatchSizeTuner", "BatchSizeFinder power", "BatchSizeFinder binsearch")
_BEGIN, _END = "<!-- measured -->\n", "<!-- end -->"


def results():
    """Returns the measurements of benchmarks/batch_size.py."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def code() -> str:
    """Returns the first block of code of the manual's page."""
    found: list[str] = re.findall(r"```python\n(.*?)```", MANUAL.read_text("utf-8"), re.DOTALL)
    return found[0]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a line for each model and device: the true maximum, then the size that each tool found."""
    heads = [
        "model",
        "device",
        "true maximum",
        "BatchSizeTuner",
        "BatchSizeFinder, power",
        "BatchSizeFinder, binsearch",
    ]
    lines = [heads, ["---", "---", "---:", "---:", "---:", "---:"]]
    for row in rows:
        others = row["used_by_others"]
        device = row["capacity"] + (f", {others} used by others" if others != "0MiB" else "")
        lines.append([row["model"], device, str(row["true_maximum"]), *(_cell(row[tool]) for tool in TOOLS)])
    return _lines(lines)


def _cell(found: Mapping[str, Any]) -> str:
    text = f"{found['size']} ({found['share_of_true_maximum']:.1%}), {found['trials']}, {found['samples']}"
    if "failure" in found:  # the finder ended the fit with this error, when its attribute had this size
        return f"{text}; ended with {found['failure'].split(':')[0]}"
    return text + (f"; {found['a_plain_fit_of_it']}" if "a_plain_fit_of_it" in found else "")


def table_of_seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the cost of each tool on real tensors."""
    lines = [["model", "device", *TOOLS], ["---", "---", "---:", "---:", "---:"]]
    for row in rows:
        costs = [f"{one['size']}, {one['steps']}, {one['cpu_seconds']:.0f} s" for one in (row[tool] for tool in TOOLS)]
        lines.append([row["model"], row["capacity"], *costs])
    return _lines(lines)


def _lines(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def large(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's device has at least 2 GiB."""
    return str(row["capacity"]).endswith("GiB")


def both_tables() -> str:
    """Returns both tables as the page shows them."""
    measured = results()
    between = "On real tensors, on small devices: the size, optimizer steps, and seconds of CPU."
    return f"{table(measured['rows'])}\n{between}\n\n{table_of_seconds(measured['on_real_tensors'])}"


def measured_part(page: str) -> str:
    """Returns the part of the page between the two marks."""
    return page.split(_BEGIN)[1].split(_END, maxsplit=1)[0]


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(_BEGIN)[0], page.split(_END)[1]
    PAGE.write_text(f"{before}{_BEGIN}\n{both_tables()}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
