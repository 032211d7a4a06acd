"""The `memtools` command. Each subcommand has a file of its own, with `add_to` and the function that it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_memtools import __version__
from lightning_memtools.cli import compare, diff, doctor, dry_run, estimate, replay, report, run
from lightning_memtools.cli.targets import UsageError, print_error


def command_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `memtools` with all of its subcommands."""
    parser = argparse.ArgumentParser(prog="memtools", description="GPU memory and training health, from the console.")
    parser.add_argument("--version", action="version", version=f"lightning_memtools {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for one in (run, dry_run, estimate, compare, report, replay, doctor, diff):
        one.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `memtools` and return its exit status: 0 for success, 1 after an error, or 130 after Ctrl-C.

    Subcommands may return other values. Without arguments, print the help and return 2, as for a wrong option.

    Args:
        arguments: The command-line arguments; by default `sys.argv[1:]`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser()
    if not given:
        parser.print_help(sys.stderr)
        return 2
    chosen = parser.parse_args(given, argparse.Namespace(command_line=given))
    try:
        status = chosen.run(chosen) or 0
        sys.stdout.flush()
    except UsageError as error:
        print(f"memtools: {error}", file=sys.stderr)  # noqa: T201, a command prints
        return 1
    except Exception as error:  # noqa: BLE001, of the user's code, as a rule
        if not (isinstance(error, BrokenPipeError) and _is_unread()):
            print_error(error)
        return 1
    except KeyboardInterrupt:
        print("memtools: interrupted", file=sys.stderr)  # noqa: T201, as above
        return 130  # 128 + SIGINT, as a shell reports it
    return status


def _is_unread() -> bool:
    """Return True if stdout is a closed pipe, as after `| head`. If so, discard the output not yet written."""
    from lightning_memtools.reporting.console import drop_what_is_left  # noqa: PLC0415, --help does not need it

    try:
        os.write(sys.stdout.fileno(), b"\n")  # sys.stdout has thrown away what it could not write, and raises no more
    except (OSError, ValueError):
        drop_what_is_left()
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
