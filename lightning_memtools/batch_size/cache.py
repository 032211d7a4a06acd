"""Sizes that were found before, in a JSON file, by what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def key_of(facts: Mapping[str, Any]) -> str:
    """A digest of everything that a result depends on, told as JSON or as text."""
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def load_sizes(path: Path, key: str) -> dict[str, int] | None:
    """The sizes found under a key; None where there are none, or the file is none of ours."""
    entry = _entries(path).get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("sizes"), dict):
        return None
    return {str(stage): int(size) for stage, size in entry["sizes"].items()}


def store_sizes(path: Path, key: str, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    """Add or replace an entry. Facts are written too, for who reads the file.

    Raises:
        OSError: The file cannot be written.
    """
    entries = _entries(path)
    entries[key] = {"sizes": dict(sizes), "facts": json.loads(json.dumps(facts, default=repr))}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another run may read meanwhile: the file is replaced as a whole.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=2)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _entries(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
