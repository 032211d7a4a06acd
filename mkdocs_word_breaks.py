"""Names in running text are broken between lines only where a reader would break them. `mkdocs.yml` names this hook."""

import html
import re

BLOCK_OR_CODE = re.compile(r"(<pre\b.*?</pre>)|(<code\b[^>]*>)(.*?)(</code>)", re.DOTALL)
TAG_OR_TEXT = re.compile(r"(<[^>]*>)|([^<]+)")
# After a separator, but neither in a number nor before the ending of a file's name.
SEPARATOR = re.compile(
    r"(?<=[/_,=(:])(?=[\w&\"'\[{-])|(?<=-)(?=&lt;)|(?<=\.)(?<!\d\.)(?=\w)(?!(?:py|md|json|html|yaml|pt|svg|pickle)\b)"
)
LONGEST_WHOLE = 20


def on_post_page(output: str, **_: object) -> str:
    """Add the places to break, now that the search index is made. Blocks of code stay as they are."""
    return BLOCK_OR_CODE.sub(lambda found: found[1] or found[2] + breakable(found[3]) + found[4], output)


def breakable(code: str) -> str:
    """Long names such as `memory/train/peak_allocated_gib` may be broken after "/" and "_", commands between words."""
    return TAG_OR_TEXT.sub(lambda part: part[1] or " <wbr>".join(map(_word, part[2].split(" "))), code)


def _word(text: str) -> str:
    return text if len(html.unescape(text)) <= LONGEST_WHOLE else SEPARATOR.sub("<wbr>", text)
