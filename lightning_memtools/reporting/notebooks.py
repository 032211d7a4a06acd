"""Results as a notebook shows them: tables, headings and paragraphs of their text, in which nothing is markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def shown_as(text: Callable[[T], str]) -> Callable[[T], str]:
    """Return a `_repr_html_` for a class whose text, in markdown, the function returns."""

    def html(result: T) -> str:
        from markdown_it import MarkdownIt  # noqa: PLC0415, only a notebook needs it

        # HTML inside of the text is shown as it is written. Lines stay lines.
        page = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").render(text(result))
        return re.sub(r"(?<=<|/)h1(?=>)", "h3", page)  # the notebook has a title of its own

    return html
