"""`memtools replay PATH`: run the step that HaltOnNaN stopped at again, and compare every bit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memtools.cli.targets import UsageError, load, working

if TYPE_CHECKING:
    from rich.status import Status


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "replay", help="run a step with NaN or Inf again, from its capsule", description=__doc__
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="the capsule that HaltOnNaN wrote")
    add_model_and_trust(parser, "the capsule")
    parser.set_defaults(run=run)


def add_model_and_trust(parser: argparse.ArgumentParser, file: str) -> None:
    """Add the options that say how the module of a saved step is made.

    Args:
        parser: The command's parser.
        file: The name of the step's file in the help.
    """
    parser.add_argument(
        "--model",
        metavar="package.Class",
        help="the module's class, made from the saved hyperparameters, or a function without arguments that makes it "
        "(default: the class that the file names)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help=f"import the modules that {file} names, without asking: this runs their code (default: ask)",
    )


def model_of(chosen: argparse.Namespace) -> Any:
    """Return what `--model` names, or None; modules are then also found in the working directory."""
    here = str(Path.cwd())
    if here not in sys.path:  # a command finds the modules of the working directory as `python -m` does
        sys.path.insert(0, here)
    return None if chosen.model is None else load(_with_colon(chosen.model))


def trusted(chosen: argparse.Namespace, status: Status) -> Callable[[str, str], bool]:
    """Return a function that asks whether a module may be imported: `--trust` or the terminal answers.

    Args:
        chosen: The command line.
        status: The line that says what is being done, which makes room for the question.
    """

    def asked(module: str, place: str) -> bool:
        status.stop()
        try:
            return _asked(module, place)
        finally:
            status.start()

    return (lambda _module, _place: True) if chosen.trust else asked


def run(chosen: argparse.Namespace) -> None:
    """Replay the step, and print the result.

    Raises:
        UsageError: The capsule cannot be read, or its module cannot be made.
    """
    from lightning_memtools.nonfinite.capsule_replay import replay  # noqa: PLC0415, as above
    from lightning_memtools.state.capsule.capsule_file import CapsuleError  # noqa: PLC0415, --help does not need torch

    model = model_of(chosen)
    try:
        with working("The step is run again") as status:
            summary = replay(chosen.path, model=model, trust=trusted(chosen, status)).summary()
    except CapsuleError as error:
        raise UsageError(str(error)) from error
    print(summary)  # noqa: T201, a command prints


def _asked(module: str, place: str) -> bool:
    """Ask at the terminal whether a module may be imported; without a terminal, it may not."""
    if not sys.stdin.isatty():
        return False
    print(f"The file names the module {module!r}, to be imported from {place!r}. Importing it runs its code.")  # noqa: T201, it asks
    return input("Import it? [y/N] ").strip().lower() in {"y", "yes"}


def _with_colon(target: str) -> str:
    module, _, name = target.rpartition(".")
    if ":" not in target and not module:
        raise UsageError(f"--model {target} names no module to import from: write --model package.Class.")
    return target if ":" in target else f"{module}:{name}"
