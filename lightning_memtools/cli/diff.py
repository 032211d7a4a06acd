"""`memtools diff A B`: shows what changed between two results, or between two git revisions of a training script."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memtools.cli.replay import add_model_and_trust
from lightning_memtools.cli.targets import UsageError, working

if TYPE_CHECKING:
    from lightning_memtools.budgets.memory_diff import MemoryDiff


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "diff",
        help="what changed between two memory results, or two git revisions of a script",
        description=f"{__doc__} A result is JSON of `memtools dry-run --json` or `memtools estimate --json`, the "
        "folder of a dry run, a memory snapshot (.pickle), a capsule of a step (.pt), or the directory of a run with "
        "TensorBoard's event files.",
    )
    parser.add_argument("results", nargs="*", metavar="RESULT", help="the two results; with --git the script")
    parser.add_argument(
        "--git", metavar="A..B",
        help="dry-run the script that follows -- at two revisions; A alone compares with the files as they are now "
        "(default: no script)",
    )  # fmt: skip
    parser.add_argument("--gpu", metavar="NAME", help="with --git: the GPU of the dry runs (default: an A100 of 1 TiB)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="with --git: optimizer steps of the dry runs (default: 3)"
    )
    parser.add_argument("--all", action="store_true", help="show all rows (default: the 15 largest of each table)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the difference as JSON (default: tables)")
    form.add_argument("--markdown", action="store_true", help="print markdown, for a comment (default: tables)")
    add_model_and_trust(parser, "a capsule")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Compare, and print what changed."""
    diff = _diff_of(chosen)
    most = None if chosen.all else 15
    if chosen.json:
        print(json.dumps(diff.as_json(), indent=1, ensure_ascii=False))  # noqa: T201, a command prints
    elif chosen.markdown:
        print(diff.to_markdown(most))  # noqa: T201
    else:
        _show(diff, most)


def _diff_of(chosen: argparse.Namespace) -> MemoryDiff:
    """Return the difference that the command line asks for.

    Raises:
        UsageError: There are not two results, or no script.
    """
    from lightning_memtools.budgets.memory_diff import MemoryDiff  # noqa: PLC0415, --help needs none
    from lightning_memtools.cli.diff_sources import peak_at_revision, peak_in  # noqa: PLC0415

    if chosen.git is not None:
        if not chosen.results:
            raise UsageError("--git needs a script: memtools diff --git main..HEAD -- train.py.")
        first, dots, second = chosen.git.partition("..")
        revisions = (first or "HEAD", (second or "HEAD") if dots else None)
        options = [f"--{name}={value}" for name in ("gpu", "steps") if (value := getattr(chosen, name)) is not None]
        sides = tuple(peak_at_revision(one, chosen.results, options) for one in revisions)
        return MemoryDiff(sides[0], sides[1], (revisions[0], revisions[1] or "files now"))
    if len(chosen.results) != 2:  # noqa: PLR2004, a difference has two sides
        raise UsageError(
            f"memtools diff compares two results, and {len(chosen.results)} were given: memtools diff before.json "
            "after.json, or memtools diff --git main..HEAD -- train.py."
        )
    with working("The results are read") as status:
        before, after = (peak_in(Path(one), chosen, status) for one in chosen.results)
    return MemoryDiff(before, after, _names(*map(Path, chosen.results)))


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return short names of two files that differ."""
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)


def _show(diff: MemoryDiff, most: int | None) -> None:
    import rich.console  # noqa: PLC0415, --help needs it not

    from lightning_memtools.reporting.tables import console_table  # noqa: PLC0415

    console = rich.console.Console()
    for text in (diff.headline, *diff.remarks):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for table in diff.tables(most):
        console.print(console_table(table))
    for text in diff.moments:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
