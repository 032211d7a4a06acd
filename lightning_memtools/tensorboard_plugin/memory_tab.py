"""The Memory tab as a plugin of TensorBoard: its routes and their data."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tensorboard.backend import http_util
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.exceptions import NotFound

from lightning_memtools.tensorboard_plugin.event_files import EventDirectory, LoggedRun, without_logger_prefix
from lightning_memtools.tensorboard_plugin.run_views import run_view, runs_view
from lightning_memtools.tensorboard_plugin.snapshot_timeline import step_view

STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}

_respond: Callable[..., wrappers.Response] = http_util.Respond
Application = Callable[[Any, Any], Iterable[bytes]]


class MemoryTab(base_plugin.TBPlugin):  # type: ignore[misc, unused-ignore]  # TensorBoard has no types
    """The plugin class that TensorBoard loads for the Memory tab.

    Args:
        context: The context that TensorBoard passes to plugins; `logdir` and `data_provider` are used.
    """

    plugin_name = "lightning_memtools"

    def __init__(self, context: base_plugin.TBContext) -> None:
        log_dir = context.logdir or ""
        local = log_dir and "://" not in log_dir and Path(log_dir).expanduser().is_dir()
        self._directory = EventDirectory(Path(log_dir).expanduser()) if local else None
        self._logs = context.data_provider
        self._lock = threading.RLock()
        self._is_active = False

    def get_plugin_apps(self) -> dict[str, Application]:
        """Return a dict from each URL path to the WSGI application that answers it."""
        views: dict[str, Callable[[wrappers.Request], wrappers.Response]] = {
            f"/{path.name}": partial(_file, path) for path in STATIC.iterdir() if path.suffix in _TYPES
        }
        views |= {"/runs": self._runs, "/run": self._run, "/step": self._step}
        return {path: wrappers.Request.application(view) for path, view in views.items()}

    def is_active(self) -> bool:
        """Return True if any run has scalars or text that this library logged.

        Always False for a log directory such as ``gs://...``, because only local directories are read.
        """
        if not self._is_active and self._directory is not None and self._has_tags():
            self._is_active = True
            # So that the curves are there when the tab is opened.
            threading.Thread(target=self._all_runs, daemon=True).start()
        return self._is_active

    def _has_tags(self) -> bool:
        scalars = self._logs.list_scalars(RequestContext(), experiment_id="", plugin_name="scalars")
        texts = self._logs.list_tensors(RequestContext(), experiment_id="", plugin_name="text")
        return any(without_logger_prefix(tag) is not None for tag in chain(*scalars.values(), *texts.values()))

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the tab's name and the path of its JavaScript module."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Memory")

    def _all_runs(self) -> Mapping[str, LoggedRun]:
        with self._lock:
            return {} if self._directory is None else self._directory.read()

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        with self._lock:  # a view must not read runs to which another request adds points
            return _json(request, runs_view(self._all_runs()))

    def _run(self, request: wrappers.Request) -> wrappers.Response:
        with self._lock:
            return _json(request, run_view(self._named(request)))

    def _step(self, request: wrappers.Request) -> wrappers.Response:
        run = self._named(request)
        assert self._directory is not None, "it has the run"
        # The run's name comes from the directories that were found, not from the request.
        return _json(request, step_view(self._directory.log_dir / run.name))

    def _named(self, request: wrappers.Request) -> LoggedRun:
        name = request.args.get("run", "")
        # A name is only looked up and never made into a path.
        run = self._all_runs().get(name)
        if run is None:
            text = f"No run {name[:200]!r} with points of lightning_memtools in this log directory."
            raise NotFound(response=_respond(request, text, "text/plain", code=404))
        return run


def _json(request: wrappers.Request, view: Mapping[str, Any]) -> wrappers.Response:
    return _respond(request, json.dumps(view, allow_nan=False), "application/json")


def _file(path: Path, request: wrappers.Request) -> wrappers.Response:
    return _respond(request, path.read_bytes(), _TYPES[path.suffix])
