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
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = "h4"  # the page has titles of its own
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    return rendered


@cache
def _parser() -> MarkdownIt:
    # Imported here: TensorBoard's start should not wait for it.
    from markdown_it import MarkdownIt  # noqa: PLC0415

    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    parser.add_render_rule("link_open", _link_to_a_new_page)
    parser.add_render_rule("text", _breakable)
    return parser


def _link_to_a_new_page(renderer: Any, tokens: Any, at: int, options: Any, env: Any) -> Any:
    tokens[at].attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
    return renderer.renderToken(tokens, at, options, env)


def _breakable(_renderer: Any, tokens: Any, at: int, *_: Any) -> str:
    # A long path or name may be broken at its slashes and underscores, so that a table need not be as wide as it.
    return re.sub(r"(?<=\w[/_])(?=\w)", "<wbr>", escape(tokens[at].content))
