"""Tables of text for the console (rich) and reports (markdown), and results for notebooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import rich.box
import rich.table
import rich.text


@dataclass(frozen=True, slots=True)
class Table:
    """A table of strings, with a title for each column.

    Attributes:
        heads: The title of each column.
        rows: The rows, each with one string per column.
        align: The alignment as one letter per column, "l" for left or "r" for right. If empty, the first column is
            left-aligned, and all others are right-aligned.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""

    def alignment(self) -> str:
        """Return a string with the alignment of each column as one letter, "l" or "r"."""
        return self.align or "l" + "r" * (len(self.heads) - 1)


def markdown_table(table: Table) -> str:
    """Return the table as GitHub-flavored markdown, which TensorBoard renders, too."""
    rule = ["---:" if letter == "r" else "---" for letter in table.alignment()]
    return "\n".join(f"| {' | '.join(_escaped(row))} |" for row in (table.heads, rule, *table.rows))


def console_table(table: Table) -> rich.table.Table:
    """Return the table as a Rich table, for the terminal."""
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for head, letter in zip(table.heads, table.alignment(), strict=True):
        # Narrow terminals wrap the name of a module; the end of it must not be missing.
        drawn.add_column(head, justify="right" if letter == "r" else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(rich.text.Text(cell) for cell in row))  # Text: "[0]" is no markup
    return drawn


# A module may have any name without a dot. Underscores within words mean nothing in markdown.
_SPECIAL = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[*<]")


def _escaped(cells: Sequence[str]) -> list[str]:
    return [_without_markup(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]


def _without_markup(cell: str) -> str:
    """Escape the markdown in a cell, so that its text shows unchanged. Text in backticks is left as it is."""
    parts = cell.split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner
        return _SPECIAL.sub(_as_text, cell).replace("`", "\\`")
    return "`".join(part if at % 2 else _SPECIAL.sub(_as_text, part) for at, part in enumerate(parts))


def _as_text(found: re.Match[str]) -> str:
    return "&lt;" if found[0] == "<" else f"\\{found[0]}"


T = TypeVar("T")


def shown_as(text: Callable[[T], str]) -> Callable[[T], str]:
    """Return a `_repr_html_` method for a class. In a notebook it shows the markdown that `text(instance)` returns."""

    def html(result: T) -> str:
        from markdown_it import MarkdownIt  # noqa: PLC0415, only a notebook needs it

        # HTML inside of the text is shown as it is written. Lines stay lines.
        page = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").render(text(result))
        return re.sub(r"(?<=<|/)h1(?=>)", "h3", page)  # the notebook has a title of its own

    return html
