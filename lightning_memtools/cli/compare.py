"""`memtools compare A B`: compares the summaries of two runs, and fails if the second takes too much more."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from lightning_memtools.cli.targets import UsageError, say

EXCEEDED = 4
"""The exit status of a run that takes more than is allowed, as that of `memtools dry-run --at-most`."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `compare` to the parser of `memtools`."""
    parser = commands.add_parser(
        "compare",
        help="compare two runs by their summary.json, as a gate for CI",
        description=f"{__doc__} Exit status: 0, 4 if a figure has increased by more than is allowed, 1 for an error.",
    )
    parser.add_argument(
        "before", metavar="A", type=Path, help="summary.json of `memtools run`, or the folder that holds it"
    )
    parser.add_argument("after", metavar="B", type=Path, help="likewise of the second run")
    parser.add_argument(
        "--max-peak-increase", metavar="PERCENT", type=_share,
        help="the largest increase of the peak of allocated memory, such as 5%% (default: any)",
    )  # fmt: skip
    parser.add_argument(
        "--max-step-time-increase", metavar="PERCENT", type=_share,
        help="the largest increase of the time of a step, such as 10%% (default: any)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else (default: a table)")
    parser.set_defaults(run=run)


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage; write 5% or 0.5%.")
    return float(match[1]) / 100


def run(chosen: argparse.Namespace) -> int:
    """Compare two run summaries, print the changes, and return the exit status: 4 if a limit is exceeded, otherwise 0.

    Raises:
        UsageError: One of the files is not the summary of a run.
    """
    from lightning_memtools.reporting.tables import console_table  # noqa: PLC0415, --help needs none
    from lightning_memtools.verdict.comparing import PEAK, STEP_TIME, compare, exceeded, table_of  # noqa: PLC0415
    from lightning_memtools.verdict.run_facts import read_summary  # noqa: PLC0415, as above

    try:
        changes = compare(read_summary(chosen.before), read_summary(chosen.after))
    except ValueError as error:
        raise UsageError(str(error)) from error
    given = {PEAK: chosen.max_peak_increase, STEP_TIME: chosen.max_step_time_increase}
    lines = exceeded(changes, {name: most for name, most in given.items() if most is not None})
    if chosen.json:
        figures = [asdict(change) | {"increase": change.increase} for change in changes]
        print(json.dumps({"figures": figures, "exceeded": lines}, indent=1))  # noqa: T201, a command prints
    else:
        say(console_table(table_of(changes)))
    for line in lines:
        print(f"memtools: {line}", file=sys.stderr)  # noqa: T201
    return EXCEEDED if lines else 0
