"""PyTorch Lightning callbacks that make GPU memory and training health visible and manageable.

Public names are resolved on first use (PEP 562): importing the package imports neither torch nor lightning, so that
command lines and TensorBoard, which load plugins at start-up, stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_memtools.memory.stats import MemoryStats

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "MemoryStats": "memory.stats",
}

__all__ = ["MemoryStats"]  # noqa: RUF022, as in DESIGN section 2: callbacks, functions, classes


def __getattr__(name: str) -> object:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
