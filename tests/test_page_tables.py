"""The tables of the manual are those of the committed summaries."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_page_is_stale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages = importlib.import_module("page_tables").pages()
    stale = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert stale == [], "run: python benchmarks/page_tables.py"
    assert {"measurements.md", "gpu-names.md"} <= {path.name for path in pages}
