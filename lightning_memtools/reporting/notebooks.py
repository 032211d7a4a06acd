"""Results as a notebook shows them: their text, which wraps, and in which nothing is markup."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TypeVar

T = TypeVar("T")


def shown_as(text: Callable[[T], str]) -> Callable[[T], str]:
    """Return a `_repr_html_` for a class whose text the function returns."""

    def html(result: T) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(text(result))}</pre>'

    return html
