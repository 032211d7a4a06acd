"""`memtools replay PATH`: run the step that HaltOnNaN stopped at again, and compare every bit."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_memtools.cli.targets import UsageError, load, working


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `replay` to the parser of `memtools`."""
    parser = commands.add_parser("replay", help="run a step with NaN or Inf again, from its file", description=__doc__)
    parser.add_argument("path", metavar="PATH", type=Path, help="the file that HaltOnNaN wrote")
    parser.add_argument(
        "--model",
        metavar="package:Class",
        required=True,
        help="the module's class, made from the hyperparameters in the checkpoint beside the file, or a function "
        "without arguments that makes it (default: none; it is required)",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Rerun a training step that produced NaN or Inf, from the file that HaltOnNaN saved, and print the result.

    Raises:
        UsageError: A file cannot be read, or the module cannot be created.
    """
    from lightning_memtools.nonfinite.step_file import StepFileError, replay  # noqa: PLC0415, --help needs no torch

    model = load(chosen.model)
    try:
        with working("The step is run again"):
            summary = replay(chosen.path, model=model).summary()
    except StepFileError as error:
        raise UsageError(str(error)) from error
    print(summary)  # noqa: T201, a command prints
