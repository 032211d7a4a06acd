"""Gives every public name a page of its own, and makes api.md their list. `mkdocs.yml` names this hook."""

import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
ENTRY = re.compile(r"^::: (?P<module>[\w.]+)\.(?P<name>\w+)\n(?P<options>(?:    .*\n)*)\n?", re.MULTILINE)


def on_config(config: Any) -> None:
    """Put the pages below api.md in the navigation."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    pages = [{found["name"]: path_of(found)} for found in ENTRY.finditer(source())]
    reference[:] = [{"Python": [entry["Python"], *pages]} if "Python" in entry else entry for entry in reference]


def on_files(files: Files, config: Any) -> Files:
    """Make the pages."""
    for found in ENTRY.finditer(source()):
        options = found["options"] or "    options:\n"
        # A page's title is the name itself.
        content = f"::: {found['module']}.{found['name']}\n{options}      heading_level: 1\n"
        files.append(File.generated(config, path_of(found), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Put a link with the first line of the docstring in the place of each name in api.md."""
    return ENTRY.sub(link_to, markdown + "\n") if page.file.src_uri == "api.md" else markdown


def link_to(found: re.Match[str]) -> str:
    """Return a name as an item of a list."""
    documented = getattr(importlib.import_module(found["module"]), found["name"])
    said = (documented.__doc__ or "").strip().splitlines()[0]
    return f"- [`{found['name']}`]({path_of(found)}): {said}\n"


def path_of(found: re.Match[str]) -> str:
    """Return the path of a name's page."""
    return f"api/{found['name']}.md"


def source() -> str:
    """Return api.md."""
    return (ROOT / "docs" / "api.md").read_text("utf-8") + "\n"
