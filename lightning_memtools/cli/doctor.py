"""`memtools doctor MODULE:CALLABLE`: finds the classic training mistakes in a model, its data and its optimizer."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from lightning_memtools.cli.targets import Target, UsageError, say, working
from lightning_memtools.reporting.tables import console_table

TARGET = Target("diagnose", ("model", "dataloader"), "optimizer")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `doctor` to the parser of `memtools`."""
    parser = commands.add_parser(
        "doctor",
        help="find the classic training mistakes, by running a few steps that are taken back",
        usage="%(prog)s [OPTIONS] MODULE:CALLABLE",
        description="Find the classic training mistakes in a model, its data and its optimizer.",
        epilog="Exit status: 0 if nothing serious was found, 1 if it was, or after an error, 2 for a wrong option.",
    )
    TARGET.add_to(parser, "A plain module needs the dict, with its step: step=lambda model, batch: loss.")
    parser.add_argument("--checkpoint", metavar="FILE", help="compare its keys with the model (default: none)")
    parser.add_argument("--checks", nargs="+", metavar="NAME", help="make these checks only (default: all)")
    parser.add_argument("--ignore", nargs="+", metavar="NAME", help="leave these checks out (default: none)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps to run (default: 20)")
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, and nothing else (default: a table)"
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Check a model for training mistakes, print the report, and return the exit status: 1 if any is serious, else 0.

    Raises:
        UsageError: The argument MODULE:CALLABLE or an option is wrong.
    """
    from lightning_memtools.doctor.diagnosing import diagnose  # noqa: PLC0415

    # What the user's own code prints must not get between the lines of the JSON.
    with redirect_stdout(sys.stderr):
        arguments = TARGET.arguments(chosen, ("checkpoint", "checks", "ignore", "steps"))
        try:
            with working("The first steps are run"):
                report = diagnose(**arguments)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
    if chosen.json:
        print(report.as_json())  # noqa: T201, a command prints
    else:
        if report.findings:
            say(console_table(report.table()))
        say(report.summary())
    return 1 if report.serious else 0
