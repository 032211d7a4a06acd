"""`memtools diff A B`: shows what changed between two results, or between two git revisions of a training script."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.cli.targets import UsageError, say, working
from lightning_memtools.null_cuda.dry_run.result import FITS, DryRunResult

if TYPE_CHECKING:
    from lightning_memtools.budgets.memory_diff import MemoryDiff


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `diff` to the parser of `memtools`."""
    parser = commands.add_parser(
        "diff",
        help="what changed between two memory results, or two git revisions of a script",
        description=f"{__doc__} A result is JSON of `memtools dry-run --json` or `memtools estimate --json`. Runs are "
        "compared in the Memory tab.",
    )
    parser.add_argument("results", nargs="*", metavar="RESULT", help="the two results; with --git the script")
    parser.add_argument(
        "--git", metavar="A..B",
        help="dry-run the script that follows --, with options of `memtools dry-run` before it, at two revisions; A "
        "alone compares with the files as they are now (default: no script)",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the difference as JSON (default: tables)")
    form.add_argument("--markdown", action="store_true", help="print markdown, for a comment (default: tables)")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print what changed in memory use between two JSON result files, or between two git revisions of a script."""
    diff = _diff_of(chosen)
    if chosen.json:
        print(json.dumps(diff.as_json(), indent=1, ensure_ascii=False))  # noqa: T201, a command prints
    elif chosen.markdown:
        print(diff.to_markdown())  # noqa: T201
    else:
        _show(diff)


def _diff_of(chosen: argparse.Namespace) -> MemoryDiff:
    """Return the memory difference between the two JSON result files, or git revisions, named on the command line.

    Raises:
        UsageError: There are not exactly two result files, or --git is given without a script to run.
    """
    from lightning_memtools.budgets.memory_diff import MemoryDiff  # noqa: PLC0415, --help needs none

    if chosen.git is not None:
        if not chosen.results:
            raise UsageError("--git needs a script: memtools diff --git main..HEAD -- train.py.")
        first, dots, second = chosen.git.partition("..")
        revisions = (first or "HEAD", (second or "HEAD") if dots else None)
        before, after = (peak_at_revision(revision, chosen.results) for revision in revisions)
        return MemoryDiff(before, after, (revisions[0], revisions[1] or "files now"))
    if len(chosen.results) != 2:  # noqa: PLR2004, a difference has two sides
        raise UsageError(
            f"memtools diff compares two results, and {len(chosen.results)} were given: memtools diff before.json "
            "after.json, or memtools diff --git main..HEAD -- train.py."
        )
    with working("The results are read"):
        before, after = (peak_in(Path(one)) for one in chosen.results)
    return MemoryDiff(before, after, (chosen.results[0], chosen.results[1]))


def _show(diff: MemoryDiff) -> None:
    from lightning_memtools.reporting.tables import console_table  # noqa: PLC0415

    say(diff.headline, *diff.remarks)
    say(*map(console_table, diff.tables()))
    say(*diff.moments)


def peak_in(path: Path) -> PeakMemory:
    """Return the peak memory in a file that `memtools dry-run --json` or `memtools estimate --json` wrote.

    Args:
        path: The path of the file.

    Raises:
        UsageError: The file cannot be read, or neither of these commands wrote it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}.") from error
    try:
        return _of_content(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} holds no result of a dry run or an estimate ({type(error).__name__}: {error}). Make one with "
            "`memtools dry-run --json` or `memtools estimate --json`."
        ) from error


def _of_content(content: Mapping[str, Any]) -> PeakMemory:
    if "tests" in content:
        raise ValueError("it is a file of recorded peaks, which pytest compares")
    return DryRunResult.from_json(content).peak if "stages" in content else PeakMemory.from_json(content)


def peak_at_revision(revision: str | None, script: Sequence[str]) -> PeakMemory:
    """Run `memtools dry-run` on a script as it was at a git revision, and return the peak memory.

    Args:
        revision: The git revision; None for the files as they are now.
        script: The arguments of `memtools dry-run`: its options, then the script and the script's own arguments.

    Raises:
        UsageError: There is no such revision, or the dry run did not complete.
    """
    here = Path.cwd()
    with ExitStack() as stack:
        if revision is not None:
            top = Path(_git("rev-parse", "--show-toplevel"))
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memtools-diff-")))
            # A copy, and no work tree of the repository's: nothing is left in it, however this ends.
            packed = tree / "packed.tar"
            _git("-C", str(top), "archive", f"--output={packed}", revision)
            with tarfile.open(packed) as archive:
                archive.extractall(tree, filter="data")
            packed.unlink()
            here = tree / here.resolve().relative_to(top.resolve())
            if not here.is_dir():
                raise UsageError(f"At {revision} there is no folder {here.relative_to(tree)}.")
        # The revision's own modules come before those that are installed, as an editable install is.
        folders = [str(here), *([str(here / "src")] if (here / "src").is_dir() else [])]
        paths = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "lightning_memtools.cli.main", "dry-run", "--json", *script]
        done = subprocess.run(  # noqa: S603, the user's own script
            command, cwd=here, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=False
        )
    where = revision or "the files as they are"
    try:
        result = DryRunResult.from_json(json.loads(done.stdout))
    except ValueError as error:
        raise UsageError(f"The dry run of {where} gave no result; what it printed stands above.") from error
    if result.status != FITS:
        raise UsageError(f"The dry run of {where}: {result.verdict}")
    return result.peak


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
    except FileNotFoundError as error:
        raise UsageError("--git needs git, which is not installed here.") from error
    if done.returncode:
        raise UsageError(f"git cannot tell: {done.stderr.strip()}")
    return done.stdout.strip()
