"""The user's function that a command line names as MODULE:CALLABLE, and the arguments that it returns."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.status import Status


class UsageError(Exception):
    """Raised if the command line is wrong. The message says what is wrong and how to correct it."""


def require_folder_of(path: str | None) -> None:
    """Check, before any long work, that the folder of the output file `path` exists. Do nothing if `path` is None.

    Raises:
        UsageError: The folder does not exist.
    """
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{path} cannot be written: the folder {Path(path).parent} does not exist.")


def working(text: str) -> Status:
    """Return a context manager that shows `text` while its body runs, if stderr is a terminal."""
    from rich.console import Console  # noqa: PLC0415, --help does not need it

    # With NO_COLOR, a terminal gets no codes at all: those that move the cursor are none of colours.
    return Console(stderr=True, force_terminal=False if os.environ.get("NO_COLOR") else None).status(f"{text} ...")


def say(*parts: Any) -> None:
    """Print strings and tables, each starting on a new line. Raise if this fails, as on a full disk."""
    from rich.console import Console  # noqa: PLC0415, --help does not need it

    console = Console()
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


def print_error(error: BaseException) -> None:
    """Print an error with its traceback. For an error in the user's code, start the traceback where that code starts.

    In that case, frames of this package are left out, and so are the innermost frames in torch or in Python itself.
    """
    from lightning_memtools.memory.user_code import owner_of  # noqa: PLC0415, --help does not need torch

    shown = traceback.TracebackException.from_exception(error)
    owners = [owner_of(frame.filename) for frame in shown.stack]
    places = [place for place, owner in enumerate(owners) if owner in {"user", "installed"}]
    if owners[-1] != "ours" and "user" in owners:
        kept = range(owners.index("user"), places[-1] + 1)
        shown.stack = traceback.StackSummary.from_list([shown.stack[i] for i in kept if owners[i] != "ours"])
    elif isinstance(error, SyntaxError):  # of a module of the user's, which no frame is in
        shown.stack.clear()
    print("".join(shown.format()), end="", file=sys.stderr)  # noqa: T201, a command prints


@dataclass(frozen=True, slots=True)
class Target:
    """Describes a function, written by the user, that returns arguments for one of our functions as a dict or a tuple.

    Attributes:
        function: The name of our function, such as "diagnose".
        required: The names of our function's first two arguments. A tuple must contain both.
        optional: The name of our function's third argument. A tuple may leave it out.
    """

    function: str
    required: tuple[str, str]
    optional: str

    @property
    def forms(self) -> str:
        """A description, for help and error messages, of what the user's function may return."""
        first = ", ".join(self.required)
        return f"({first}), ({first}, {self.optional}), or a dict with the arguments of {self.function}"

    def add_to(self, parser: argparse.ArgumentParser, advice: str = "") -> None:
        """Add the argument MODULE:CALLABLE, which names the user's function, to a subcommand.

        Args:
            parser: The parser of the subcommand.
            advice: A sentence to append to the help text.
        """
        text = f"a function without arguments that returns {self.forms}. {advice}"
        parser.add_argument("target", metavar="MODULE:CALLABLE", help=text.strip())

    def arguments(self, chosen: argparse.Namespace, options: tuple[str, ...]) -> dict[str, Any]:
        """Call the user's function and return its result as a dict of arguments, overridden by command-line `options`.

        Raises:
            UsageError: There is no such function, it needs arguments, or it returns neither a dict nor a valid tuple.
        """
        function = load(chosen.target)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise UsageError(
                f"{chosen.target} cannot be called without arguments: {error}. Name a function that needs none."
            ) from error
        except ValueError:  # a builtin without a signature
            pass
        returned: Any = function()
        if isinstance(returned, Mapping):
            arguments = dict(returned)
        elif isinstance(returned, tuple) and len(returned) in {2, 3}:
            arguments = dict(zip((*self.required, self.optional), returned, strict=False))
        else:
            raise UsageError(
                f"{chosen.target} returned a value of type {type(returned).__name__}. Return {self.forms}."
            )
        given = {name: getattr(chosen, name) for name in options}
        return arguments | {name: value for name, value in given.items() if value is not None}


def load(target: str) -> Callable[[], Any]:
    """Import and return the callable named MODULE:CALLABLE. The working directory is searched for modules, too.

    Raises:
        UsageError: There is no such callable.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise UsageError(f"{target!r} names no callable: write MODULE:CALLABLE, such as my_project:model_and_batch.")
    if module_name.endswith(".py"):
        # An import would run the script as the parent of a module "py".
        dotted = module_name.removesuffix(".py").replace("/", ".").lstrip(".")
        raise UsageError(f"{module_name!r} is a file: write the module's name, {dotted}:{name}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(f"No module {error.name!r} here or among what is installed. You are in {here}.") from error
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UsageError(f"Module {module_name!r} has no {name!r}.")
    if not callable(found):
        raise UsageError(f"{target} is {found!r:.80}, which cannot be called: name a function.")
    function: Callable[[], Any] = found
    return function
