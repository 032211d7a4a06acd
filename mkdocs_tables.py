"""Tables of three columns and more read on a telephone: a row becomes a card. `mkdocs.yml` names this hook."""

import re
from html import escape, unescape

TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
MOST_COLUMNS_BESIDE = 2


def on_post_page(output: str, **_: object) -> str:
    """Write the name of its column into each cell, which docs/stylesheets/extra.css shows in a narrow window."""
    return TABLE.sub(lambda found: labelled(found[1]), output)


def labelled(table: str) -> str:
    """Return a table with the names of columns in its cells."""
    names = [unescape(re.sub(r"<[^>]*>", "", name)).strip() for name in HEAD.findall(table)]
    if len(names) <= MOST_COLUMNS_BESIDE:
        return f"<table>{table}</table>"

    def row(found: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub(r"<td\b", lambda _: f'<td data-column="{escape(next(columns))}"', found[0])

    return f"<table data-cards>{ROW.sub(row, table)}</table>"
