"""The Memory tab as a single HTML file that needs no server and no other files."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lightning_memtools.tensorboard_plugin.event_files import LoggedRun
from lightning_memtools.tensorboard_plugin.run_views import run_view, runs_view
from lightning_memtools.tensorboard_plugin.snapshot_timeline import step_view

_STATIC = Path(__file__).parent / "static"
_STYLES = ("uPlot.min.css", "memory_tab.css")
_IMPORT = re.compile(r'from "\./([\w.]+\.js)"')
# The page may run only what it brings along, and cannot send anything anywhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"

_START = """
import { start } from "memtools/app.js";
const held = JSON.parse(document.getElementById("held").textContent);
const source = {
  grows: false,
  runs: async () => held.runs,
  run: async (run) => held.views[run],
  step: async (run) => held.steps[run],
};
start(document.getElementById("memtools"), source);
"""
_START_SNAPSHOT = """
import { startSnapshot } from "memtools/snapshot_page.js";
startSnapshot(document.getElementById("memtools"), JSON.parse(document.getElementById("held").textContent));
"""


def report_html(runs: Mapping[str, LoggedRun], log_dir: Path) -> str:
    """Return an HTML page that shows the runs of a log directory in the same way as TensorBoard's Memory tab.

    Args:
        runs: The runs to show, by name.
        log_dir: The log directory, whose memory snapshots are included.
    """
    held = {
        "runs": runs_view(runs),
        "views": {name: run_view(run) for name, run in runs.items()},
        "steps": {name: step_view(log_dir / name) for name in runs},
    }
    return _page(f"Memory: {log_dir}", held, _START)


def snapshot_html(timeline: Mapping[str, Any], title: str) -> str:
    """Return an HTML page that shows the timeline of one memory snapshot."""
    return _page(title, timeline, _START_SNAPSHOT)


def _page(title: str, held: Mapping[str, Any], start: str) -> str:
    # "<" ends a script element if "/script>" follows, whatever it is part of.
    data = json.dumps(held, allow_nan=False).replace("<", "\\u003c")
    styles = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _STYLES)
    return (
        '<!doctype html>\n<html lang="en" data-page="report">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{styles}\n</style>\n"
        f'<script type="importmap">{json.dumps({"imports": dict(_modules())})}</script>\n</head>\n'
        f'<body>\n<div id="memtools"></div>\n<script type="application/json" id="held">{data}</script>\n'
        f'<script type="module">{start}</script>\n</body>\n</html>\n'
    )


def _modules() -> Iterator[tuple[str, str]]:
    """Yield (name, data URL) of each JavaScript module. An import map needs both to replace relative imports."""
    for path in sorted(_STATIC.glob("*.js")):
        source = _IMPORT.sub(r'from "memtools/\1"', path.read_text(encoding="utf-8"))
        encoded = base64.b64encode(source.encode()).decode()
        yield f"memtools/{path.name}", f"data:text/javascript;base64,{encoded}"
