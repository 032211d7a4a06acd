"""Gives the wheel README.md with absolute links, and the project's addresses, so that a package index shows both.

The repository's public address stands in pyproject.toml, under [tool.hatch.metadata.hooks.custom]. As long as there is
none, the text of each link stays, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)]+)\)")


def with_absolute_links(text: str, repository: str) -> str:
    """Return markdown whose relative links lead into the repository; without an address, without these links."""

    def absolute(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        if not repository:
            return "" if mark else words
        return f"{mark}[{words}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/HEAD/{path})"

    return _LINK.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """Hatch finds it by this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description and the addresses."""
        repository = str(self.config.get("repository", "")).rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, repository)}
        if repository:
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/tree/HEAD/docs",
                "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
