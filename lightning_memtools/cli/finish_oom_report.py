"""`memtools oom-report FILE --finish`: make the checks for which an out-of-memory report had no time."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_memtools.cli.replay import add_model_and_trust, model_of, trusted
from lightning_memtools.cli.targets import UsageError, working


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "oom-report", help="print an out-of-memory report, or finish its checks", description=__doc__
    )
    parser.add_argument("path", metavar="FILE", type=Path, help="OOMReport's report, oom-<stage>-step<n>.md")
    parser.add_argument(
        "--finish",
        action="store_true",
        help="make all checks, without a limit of time, and rewrite it (default: print it)",
    )
    add_model_and_trust(parser, "the report's step")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Finish the report if that is asked for, and print it.

    Raises:
        UsageError: There is no report, or its step cannot be read or made again.
    """
    try:
        text = _finished(chosen) if chosen.finish else chosen.path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{chosen.path} cannot be read or written: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{chosen.path} is not a report: it is not text.") from error
    print(text, end="")  # noqa: T201, a command prints


def _finished(chosen: argparse.Namespace) -> str:
    from lightning_memtools.oom.oom_reporter import finish_report  # noqa: PLC0415, --help does not need torch
    from lightning_memtools.oom.saved_step import SavedStepError  # noqa: PLC0415, as above
    from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError, read_snapshot  # noqa: PLC0415

    model = model_of(chosen)
    try:
        with working("The failed step is traced with each change") as status:
            return finish_report(chosen.path, read_snapshot, model=model, trusts=trusted(chosen, status))
    except (SavedStepError, NotASnapshotError) as error:
        raise UsageError(str(error)) from error
