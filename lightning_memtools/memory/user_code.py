"""Finds the lines of the user's own code, not those of libraries, in a traceback or on the stack."""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

CodeOwner = Literal["user", "installed", "passing", "ours"]

_THIS_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Autograd's engine and an optimizer's step: what they allocate belongs to no line that called them.
_ENGINES = frozenset({f"{_TORCH}autograd/graph.py", f"{_TORCH}optim/optimizer.py"})
LIGHTNING_PACKAGES = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
# Installed packages that only pass calls on.
PASSING_PACKAGES = LIGHTNING_PACKAGES | {"lightning_utilities", "torchmetrics"}


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code.

    Attributes:
        file: The file's path.
        line: The line's number, from 1.
        function: The name of the function that the line belongs to.
        caller: For a line in an installed package, the file and line number of the user code that called the package.
    """

    file: str
    line: int
    function: str
    caller: tuple[str, int] | None = None

    @property
    def source(self) -> str:
        """The text of the line without its indentation; empty if the file cannot be read."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.line).strip()

    @property
    def described(self) -> str:
        """A description with file, line number and text, such as "model.py:48: x = self.norm(x)"."""
        return f"{short_path(self.file)}:{self.line}: {self.source}"

    def __str__(self) -> str:
        text = f"{short_path(self.file)}:{self.line}"
        return text if self.caller is None else f"{text}, called from {short_path(self.caller[0])}:{self.caller[1]}"


def short_path(file: str) -> str:
    """Return a path relative to the working directory. A file of an installed package is shown as "package/file.py"."""
    parts = Path(file).parts
    for installed in _INSTALLED:
        if installed in parts:
            return str(Path(*parts[parts.index(installed) + 1 :]))
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@lru_cache(maxsize=4096)
def owner_of(file: str) -> CodeOwner:
    """Return whose code a file contains.

    Returns:
        "user" for the user's own code; "installed" for an installed library; "ours" for this package; "passing" for
        torch, Lightning, the standard library and code without a file. A search for the calling code skips "passing".
    """
    if file.startswith(_THIS_PACKAGE):
        return "ours"
    parts = Path(file).parts
    installed = next((parts.index(name) for name in _INSTALLED if name in parts), None)
    if file.startswith(("<", _TORCH)) or (installed is None and file.startswith(_STANDARD_LIBRARY)):
        return "passing"
    if installed is None:
        return "user"
    return "passing" if parts[installed + 1] in PASSING_PACKAGES else "installed"


def user_line_of(error: BaseException) -> CodeLine | None:
    """Return the innermost line of user code in an error's traceback; None if the traceback has no user code."""
    found = None
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if owner_of(code.co_filename) == "user":
            found = CodeLine(code.co_filename, entry.tb_lineno, code.co_name)
        entry = entry.tb_next
    return found


def line_on_stack(*, stop_at: Collection[str] = frozenset()) -> CodeLine | None:
    """Return the innermost line on the stack that belongs to the user or to an installed library.

    It is fast enough to be called for every operation: it reads no files.

    Args:
        stop_at: A set of files; the search ends at the first frame that is in one of them.

    Returns:
        The line, or None if there is none. For a library's line, `caller` is the user's line that called the library.
    """
    # traceback.extract_stack would read the source of every frame.
    found: tuple[str, int, str] | None = None
    for file, line, function in _stack():
        if file in stop_at:
            break
        owner = owner_of(file)
        if owner == "user":
            return CodeLine(file, line, function) if found is None else CodeLine(*found, caller=(file, line))
        if owner == "installed" and found is None:
            found = file, line, function
    return None if found is None else CodeLine(*found)


def line_of_frames(frames: Sequence[Mapping[str, Any]], *, stop_at: str = "") -> CodeLine | None:
    """Return the innermost line of user or library code in a recorded stack (see `line_that_allocates`).

    Args:
        frames: The frames of an entry of torch's memory history, innermost first.
        stop_at: A file; the search ends at the first frame in it.
    """
    return _allocating(((frame["filename"], frame["line"], frame["name"]) for frame in frames), stop_at)


def line_that_allocates(*, stop_at: str = "") -> CodeLine | None:
    """Return the innermost line of user or library code on the stack; None if autograd or an optimizer allocates.

    Args:
        stop_at: A file; the search ends at the first frame in it.
    """
    # As line_on_stack, without the caller of an installed library, whose search would reach further up each time.
    return _allocating(_stack(), stop_at)


def _stack() -> Iterator[tuple[str, int, str]]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _allocating(stack: Iterable[tuple[str, int, str]], stop_at: str) -> CodeLine | None:
    for file, line, function in stack:
        if file == stop_at or file in _ENGINES:
            break
        if owner_of(file) in {"user", "installed"}:
            return CodeLine(file, line, function)
    return None


def calling_package() -> str:
    """Return the name of the installed package (other than torch) that called this package; "" if there is none."""
    for file, _, _ in _stack():
        if not file.startswith((_THIS_PACKAGE, _TORCH, "<")):
            parts = Path(file).parts
            return next((parts[parts.index(name) + 1] for name in _INSTALLED if name in parts), "")
    return ""
