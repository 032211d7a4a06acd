"""Names in running text are broken between lines only where a reader would break them. `mkdocs.yml` names this hook."""

import re

BLOCK_OR_CODE = re.compile(r"(<pre\b.*?</pre>)|(<code\b[^>]*>)(.*?)(</code>)", re.DOTALL)
TAG_OR_TEXT = re.compile(r"(<[^>]*>)|([^<]+)")
# Between words, and after a separator inside of a name, but neither in a number nor before the ending of a file's name.
BREAK = re.compile(
    r"(?<= )(?=\S)|(?<=[/_,=(:])(?=[\w&\"'\[{-])|(?<=\.)(?<!\d\.)(?=\w)(?!(?:py|md|json|html|yaml|pt|svg|pickle)\b)"
)


def on_post_page(output: str, **_: object) -> str:
    """Add the places to break, now that the search index is made. Blocks of code stay as they are."""
    return BLOCK_OR_CODE.sub(lambda found: found[1] or found[2] + breakable(found[3]) + found[4], output)


def breakable(code: str) -> str:
    """`memory/train/allocated_gib` may be broken after "/" and "_", a command between its words."""
    return TAG_OR_TEXT.sub(lambda part: part[1] or BREAK.sub("<wbr>", part[2]), code)
