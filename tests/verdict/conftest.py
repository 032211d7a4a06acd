"""The entry points as an installation has them, made of pyproject.toml, for whatever is installed here."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package's metadata, first on the path, also for processes that a test starts."""
    metadata = tmp_path / "installed" / "lightning_memtools-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning_memtools\nVersion: 0.1.0\n")
    groups = PROJECT["entry-points"].items()
    lines = [[f"[{group}]", *(f"{name} = {value}" for name, value in points.items())] for group, points in groups]
    (metadata / "entry_points.txt").write_text("\n".join(line for group in lines for line in group))
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.setenv("PYTHONPATH", f"{metadata.parent}:{Path(__file__).parents[2]}")
    monkeypatch.chdir(tmp_path)
    return metadata.parent
