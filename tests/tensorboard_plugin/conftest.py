"""A TensorBoard server with the Memory tab."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _plugin_is_installed(tmp_path_factory):
    """Where the package was installed before it had the tab, give the server the entry point of pyproject.toml."""
    if importlib.metadata.entry_points(group="tensorboard_plugins", name="lightning_memtools"):
        yield
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "memory_tab-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memory-tab\nVersion: 0\n")
    points = project["entry-points"]["tensorboard_plugins"]
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[tensorboard_plugins]\n{lines}\n")
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join([before, str(folder)])
    yield
    os.environ["PYTHONPATH"] = before
