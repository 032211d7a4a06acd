"""`memtools report LOGDIR`: writes what TensorBoard's Memory tab shows of a log directory to one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_memtools.cli.targets import UsageError, working


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "report", help="write the Memory tab of a log directory to one HTML file", description=__doc__
    )
    parser.add_argument("log_dir", metavar="LOGDIR", type=Path, help="as given to tensorboard --logdir")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        type=Path,
        default=Path("report.html"),
        help="the file (default: report.html)",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Write the file, and print its path.

    Raises:
        UsageError: The directory does not exist or has nothing to show, or the file cannot be written.
    """
    from lightning_memtools.tensorboard_plugin.event_files import EventDirectory  # noqa: PLC0415, --help needs none
    from lightning_memtools.tensorboard_plugin.report_html import report_html  # noqa: PLC0415, as above

    if not chosen.log_dir.is_dir():
        raise UsageError(f"There is no directory {chosen.log_dir}. Give the one that holds the event files.")
    directory = EventDirectory(chosen.log_dir)
    with working("The event files are read"):
        directory.refresh()
    runs = directory.runs()
    if not runs:
        raise UsageError(
            f"No event file below {chosen.log_dir} holds curves or reports of lightning_memtools. Train with "
            "Trainer(callbacks=lightning_memtools.default_callbacks()) and a TensorBoardLogger first."
        )
    try:
        with working("The page is written"):
            page = report_html(runs, f"Memory: {chosen.log_dir}", log_dir=chosen.log_dir)
            chosen.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{chosen.output} cannot be written: {error.strerror}.") from error
    print(f"{chosen.output}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}. Open it in a browser.")  # noqa: T201, a command prints
