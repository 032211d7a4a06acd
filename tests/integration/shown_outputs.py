"""The lines of their output that docs/examples.md shows of the examples."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/examples.md").read_text("utf-8")
SHOWN = dict(re.findall(r"\npython examples/(\w+\.py).*?\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


def not_printed(example: str, printed: str) -> list[str]:
    """Return the lines that the page shows of an example and that it did not print; spaces do not count."""
    one_line = " ".join(printed.split())
    return [line for line in SHOWN[example].splitlines() if line != "..." and " ".join(line.split()) not in one_line]
