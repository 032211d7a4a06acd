"""Lets the processes that tests start spend less time on `import lightning` and on their end: see tests/conftest.py.

torchmetrics imports SciPy's signal processing and transformers where they are installed, for metrics that no test uses:
that is 40% of the time that `import lightning` takes. It is told that they are missing, and nothing else is.

A third of the rest is passes of the garbage collector over all that was imported, at the end of a process too, which
find nothing. The collector waits until torch or Lightning is imported, and leaves the last passes out.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

_HIDDEN = ("scipy", "transformers")


class _Finder(MetaPathFinder):
    """Finds the packages below as ever, and loads each within its context manager."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        within = _LOADED_WITHIN.get(fullname)
        if within is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_within(module: ModuleType) -> None:
                with within():
                    load(module)

            spec.loader.exec_module = load_within  # type: ignore[method-assign]
        return spec


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _hidden() -> Iterator[None]:
    imports: Any = importlib.import_module("lightning_utilities.core.imports")

    version = imports._version

    def version_unless_hidden(package: str) -> str:
        if package in _HIDDEN:
            raise PackageNotFoundError(package)
        return str(version(package))

    names = [name for name in _HIDDEN if name not in sys.modules]
    imports._version = version_unless_hidden
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: an import of this name fails
    try:
        yield
    finally:
        imports._version = version
        for name in names:
            del sys.modules[name]


_LOADED_WITHIN = {
    "torchmetrics": _hidden,
    **dict.fromkeys(("torch", "lightning", "pytorch_lightning"), _collecting_nothing),
}

sys.meta_path.insert(0, _Finder())
atexit.register(gc.freeze)  # the first to be registered, it runs last
