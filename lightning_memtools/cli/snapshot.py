"""`memtools snapshot FILE`: shows a memory snapshot, torch's own or ours, as one HTML file that loads nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_memtools.cli.targets import UsageError, working


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser("snapshot", help="show a memory snapshot as one HTML file", description=__doc__)
    parser.add_argument(
        "file", metavar="FILE.pickle", type=Path, help="of MemoryMonitor(snapshot_at_step=...) or torch.cuda.memory"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.html",
        type=Path,
        default=None,
        help="the file (default: FILE.html beside FILE.pickle)",
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Write the file, and print its path.

    Raises:
        UsageError: The file is no snapshot, or the page cannot be written.
    """
    from lightning_memtools.tensorboard_plugin.report_html import snapshot_html  # noqa: PLC0415, --help needs none
    from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError  # noqa: PLC0415, as above
    from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from  # noqa: PLC0415, as above

    try:
        with working("The snapshot is read"):
            timeline = timeline_from(chosen.file, with_blocks=True)
    except NotASnapshotError as error:
        raise UsageError(str(error)) from error
    output: Path = chosen.output or chosen.file.with_suffix(".html")
    try:
        with working("The page is written"):
            page = snapshot_html(timeline, f"Memory: {chosen.file.name}")
            output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from error
    what = f"{timeline['n_events']:,} events, {len(timeline['blocks']):,} blocks"
    print(f"{output}: {what}. Open it in a browser.")  # noqa: T201, a command prints
