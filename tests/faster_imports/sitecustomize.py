"""Makes `import lightning` faster in the processes that tests start: see tests/conftest.py.

torchmetrics imports SciPy's signal processing and transformers where they are installed, for metrics that no test uses:
that is 40% of the time that `import lightning` takes. It is told that they are missing, and nothing else is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

_HIDDEN = ("scipy", "transformers")


class _TorchmetricsFinder(MetaPathFinder):
    """Finds torchmetrics as ever, and loads it while the packages above are hidden."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchmetrics":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_without(module: ModuleType) -> None:
                with _hidden():
                    load(module)

            spec.loader.exec_module = load_without  # type: ignore[method-assign]
        return spec


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


sys.meta_path.insert(0, _TorchmetricsFinder())
