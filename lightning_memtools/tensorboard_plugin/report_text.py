"""Renders the markdown of a report as HTML. The report may come from a stranger's logs: no script in it may run."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


def report_as_html(text: str) -> str:
    """Return a report's markdown as HTML. HTML within the markdown is escaped, so it shows as text."""
    rendered: str = _parser().render(text)
    return rendered


@cache
def _parser() -> MarkdownIt:
    # Imported here: TensorBoard's start should not wait for it.
    from markdown_it import MarkdownIt  # noqa: PLC0415

    # No report of this library holds images or links: what looks like one is shown as text.
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.disable(["image", "link", "autolink", "reference"])
    parser.add_render_rule("heading_open", lambda *_: "<h4>")  # the page has titles of its own
    parser.add_render_rule("heading_close", lambda *_: "</h4>\n")
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    parser.add_render_rule("text", _breakable)
    return parser


def _breakable(_renderer: Any, tokens: Any, at: int, *_: Any) -> str:
    # A long path or name may be broken at its slashes and underscores, so that a table need not be as wide as it.
    return re.sub(r"(?<=\w[/_])(?=\w)", "<wbr>", escape(tokens[at].content))
