"""One table, for the console (rich) and for reports (markdown)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.table
import rich.text


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text; the first column is left-aligned, the others are figures."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown_table(table: Table) -> str:
    """The table as GitHub-flavoured markdown, which TensorBoard renders too."""
    rule = ["---", *("---:" for _ in table.heads[1:])]
    return "\n".join(f"| {' | '.join(_escaped(row))} |" for row in (table.heads, rule, *table.rows))


def console_table(table: Table) -> rich.table.Table:
    """The table for a terminal."""
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(table.heads):
        drawn.add_column(head, justify="left" if i == 0 else "right")
    for row in table.rows:
        drawn.add_row(*(rich.text.Text(cell) for cell in row))  # Text: "[0]" is no markup
    return drawn


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
