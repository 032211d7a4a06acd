"""The lines of their output that docs/examples.md shows of the examples."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/examples.md").read_text("utf-8")
SHOWN = dict(re.findall(r"\npython examples/(\w+\.py).*?\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


def not_printed(example: str, printed: str) -> list[str]:
    """Return the lines that the page shows of an example and that it did not print; spaces do not count.

    "..." stands for what the page leaves out, within a line too. The last digit of a size may be another: small tensors
    in garbage count until it is collected, which each version of Python does at other times.
    """
    one_line = " ".join(printed.split())
    lines = [line for line in SHOWN[example].splitlines() if line != "..."]
    return [line for line in lines if not re.search(_pattern(line), one_line)]


def _pattern(line: str) -> str:
    parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
    return re.sub(r"\d(?=\\ [KMG]iB)", r"\\d", r".{0,300}?".join(parts))
