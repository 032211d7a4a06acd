"""`memtools report LOGDIR` and `memtools snapshot FILE`: the Memory tab, or a memory snapshot, as one HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lightning_memtools.cli.targets import UsageError, working


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands `report` and `snapshot` to the parser of `memtools`."""
    report = _add(commands, "report", "write the Memory tab of a log directory to one HTML file", _report)
    report.add_argument("source", metavar="LOGDIR", type=Path, help="as given to tensorboard --logdir")
    _add_output(report, "report.html")
    snapshot = _add(commands, "snapshot", "show a memory snapshot, torch's own or ours, as one HTML file", _snapshot)
    text = "of MemoryMonitor(snapshot_at_step=...) or torch.cuda.memory"
    snapshot.add_argument("source", metavar="FILE.pickle", type=Path, help=text)
    _add_output(snapshot, "FILE.html beside FILE.pickle")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=f"{what.capitalize()}. It loads nothing from elsewhere.")
    parser.set_defaults(run=run)
    return parser


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("-o", "--output", metavar="FILE.html", type=Path, help=f"the file (default: {default})")


def _report(chosen: argparse.Namespace) -> None:
    """Write an HTML page about the runs in a directory. Raise UsageError if there is no directory, or no run in it."""
    from lightning_memtools.tensorboard_plugin.event_files import EventDirectory  # noqa: PLC0415, --help needs none
    from lightning_memtools.tensorboard_plugin.report_html import report_html  # noqa: PLC0415, as above

    log_dir: Path = chosen.source
    if not log_dir.is_dir():
        raise UsageError(f"There is no directory {log_dir}. Give the one that holds the event files.")
    with working("The event files are read"):
        runs = EventDirectory(log_dir).read()
    if not runs:
        raise UsageError(
            f"No event file below {log_dir} holds curves or reports of lightning_memtools. Train with memtools run, or "
            "with Trainer(callbacks=lightning_memtools.default_callbacks()) and a TensorBoardLogger first."
        )
    output = chosen.output or Path("report.html")
    _write(output, lambda: report_html(runs, log_dir))
    print(f"{output}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}. Open it in a browser.")  # noqa: T201


def _snapshot(chosen: argparse.Namespace) -> None:
    """Write an HTML page that shows a CUDA memory snapshot. Raise UsageError if the file is not a snapshot."""
    from lightning_memtools.tensorboard_plugin.report_html import snapshot_html  # noqa: PLC0415, --help needs none
    from lightning_memtools.tensorboard_plugin.snapshot_file import NotASnapshotError  # noqa: PLC0415, as above
    from lightning_memtools.tensorboard_plugin.snapshot_timeline import timeline_from  # noqa: PLC0415, as above

    try:
        with working("The snapshot is read"):
            timeline = timeline_from(chosen.source)
    except NotASnapshotError as error:
        raise UsageError(str(error)) from error
    output = chosen.output or chosen.source.with_suffix(".html")
    _write(output, lambda: snapshot_html(timeline, f"Memory: {chosen.source.name}"))
    print(f"{output}: {timeline['n_events']:,} events. Open it in a browser.")  # noqa: T201


def _write(output: Path, page: Callable[[], str]) -> None:
    try:
        with working("The page is written"):
            output.write_text(page(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from error
