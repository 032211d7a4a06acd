"""Where an operation stands: the module that runs, and the line of the user's file."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memtools.nonfinite.names import plain_name

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")
# Installed packages that only pass calls on.
_CARRIERS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")
_ENGINE = str(Path(_TORCH) / "autograd" / "graph.py")  # who calls backward; frames within it belong to backward


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code.

    Attributes:
        file: The file's path.
        line: The line's number, from 1.
        function: The function that the line belongs to.
        caller: Where the line is in an installed package: (file, line) of the user's code that led there.
    """

    file: str
    line: int
    function: str
    caller: tuple[str, int] | None = None

    def __str__(self) -> str:
        text = f"{short(self.file)}:{self.line}"
        return text if self.caller is None else f"{text}, called from {short(self.caller[0])}:{self.caller[1]}"


def short(file: str) -> str:
    """A path below the working directory as it is from there, within an installed package from the package on."""
    parts = Path(file).parts
    for installed in _INSTALLED:
        if installed in parts:
            return str(Path(*parts[parts.index(installed) + 1 :]))
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """user, installed, ours, or passing (torch, Lightning, the standard library)."""
    if file.startswith(_OURS):
        return "ours"
    parts = Path(file).parts
    installed = next((parts.index(name) for name in _INSTALLED if name in parts), None)
    if file.startswith(("<", _TORCH)) or (installed is None and file.startswith(_STANDARD)):
        return "passing"
    if installed is None:
        return "user"
    return "passing" if parts[installed + 1] in _CARRIERS else "installed"


def place_here(*, in_backward: bool) -> Place | None:
    """The innermost line on the stack that belongs neither to torch, Lightning nor this package.

    In backward only what runs within it counts (the backward of a torch.autograd.Function, or a forward pass that is
    run again); None where that is torch's alone.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001, the stack itself: traceback would read files for every operation
    found: tuple[str, int, str] | None = None
    while frame is not None:
        file, code = frame.f_code.co_filename, frame.f_code
        if file.endswith("rerun.py") and kind_of(file) == "ours":
            break  # beyond are those who called for the step to be run again
        if in_backward and file == _ENGINE:
            break
        kind = kind_of(file)
        if kind == "user":
            if found is None:
                return Place(file, frame.f_lineno, code.co_name)
            return Place(*found, caller=(file, frame.f_lineno))
        if kind == "installed" and found is None:
            found = file, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None if found is None else Place(*found)


class ModuleStack:
    """Which module of a model runs now. Global hooks, so that nothing on the model changes."""

    def __init__(self, model: Module) -> None:
        self._names = {id(part): plain_name(name) for name, part in model.named_modules()}
        self._running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, as long as the context lasts."""
        self._running.clear()
        hooks = [
            register_module_forward_pre_hook(self._enter),
            # Also when forward fails: else it would seem to run for ever.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def now(self) -> str:
        """The name of the innermost known module that runs; empty outside of all, as in training_step itself."""
        return next((name for name in reversed(self._running) if name), "")

    def _enter(self, module: Module, _arguments: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
