"""Compares what a program printed with what a page of the manual shows of it."""

import re


def not_printed(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows and that were not printed; spaces do not count.

    "..." stands for what the page leaves out, within a line too. The last digit of a size or a share may be another:
    small tensors in garbage count until it is collected, which each version of Python does at other times.
    """
    one_line = " ".join(printed.split())
    lines = [line for line in shown.splitlines() if line != "..."]
    return [line for line in lines if not re.search(_pattern(line), one_line)]


def _pattern(line: str) -> str:
    parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
    return re.sub(r"\d(?=\\ [KMG]iB|%)", r"\\d", r".{0,300}?".join(parts))
