"""`memtools doctor MODULE:CALLABLE`: finds the classic training mistakes in a model, its data and its optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lightning_memtools.cli.estimate import UsageError, load
from lightning_memtools.reporting.tables import console_table


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="find the classic training mistakes, by running a few steps that are taken back",
        description=__doc__,
        epilog="Exit status: 0 if nothing serious was found, 1 if something was, or the command line is wrong.",
    )
    parser.add_argument(
        "target",
        metavar="MODULE:CALLABLE",
        help="a function without arguments that returns (model, dataloader), (model, dataloader, optimizer), or a dict "
        "with the arguments of diagnose",
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="compare its keys with the model, before it is loaded")
    parser.add_argument("--checks", nargs="+", metavar="NAME", help="make these checks only")
    parser.add_argument("--ignore", nargs="+", metavar="NAME", help="leave these checks out")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps to run (20)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Examine, print the report, and return 1 if something serious was found.

    Raises:
        UsageError: The target or an option is wrong.
    """
    import rich.console  # noqa: PLC0415, --help needs none of these

    from lightning_memtools.doctor.diagnosing import diagnose  # noqa: PLC0415

    arguments = _arguments_of(load(chosen.target)(), chosen.target)
    for name in ("checkpoint", "checks", "ignore", "steps"):
        if getattr(chosen, name) is not None:
            arguments[name] = getattr(chosen, name)
    try:
        report = diagnose(**arguments)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if chosen.json:
        print(report.as_json())  # noqa: T201, a command prints
    else:
        console = rich.console.Console()
        if report.findings:
            console.print(console_table(report.table()))
        console.print(
            f"{len(report.checks)} checks, {report.steps} training steps: {len(report.findings)} findings, "
            f"{len(report.serious)} serious.",
            markup=False,
        )
    return 1 if report.serious else 0


def _arguments_of(returned: Any, target: str) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple) and len(returned) in {2, 3}:
        return dict(zip(("model", "dataloader", "optimizer"), returned, strict=False))
    raise UsageError(
        f"{target} returned {returned!r:.80}. Return (model, dataloader), (model, dataloader, optimizer), or a dict "
        "with the arguments of diagnose."
    )
