"""`memtools run SCRIPT`: runs a training script as it is, with our callbacks in each Trainer, and gives a verdict."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightning_memtools.autoload import VARIABLE
from lightning_memtools.cli.targets import UsageError

_GROUP = "lightning.pytorch.callbacks_factory"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `run` to the parser of `memtools`."""
    parser = commands.add_parser(
        "run",
        help="run an unchanged training script with the callbacks, and end with a verdict",
        description=f"{__doc__} `MEMTOOLS=1 python train.py` does the same, also under torchrun and srun. The exit "
        "status is the script's own.",
    )
    parser.add_argument(
        "--with", dest="add", action="append", metavar="NAME",
        help="add a callback that is not in default_callbacks(), such as LossSpikes; may be repeated (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--without", dest="leave_out", action="append", metavar="NAME",
        help="leave a callback out; may be repeated (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="arguments", action="append", metavar="NAME.ARGUMENT=VALUE",
        help="an argument of a callback, such as HaltOnNaN.max_skips=3, with a value as in YAML; may be repeated "
        "(default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--dry", action="store_true", help="run it dry, without a GPU: memtools dry-run SCRIPT (default: really)"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module (default: a file)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script, as it is")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run the user's script with our callbacks, in place of this process. The script sees the same `sys.argv` as usual.

    Raises:
        UsageError: There is no such script or callback, or the package's entry points are not installed.
    """
    if not chosen.module and not Path(chosen.script).is_file():
        raise UsageError(f"There is no file {chosen.script}. Give the script, or with -m the name of its module.")
    script = [*(["-m"] if chosen.module else []), chosen.script, *chosen.script_arguments]
    options = _options(chosen)
    if chosen.dry:
        if options:
            raise UsageError("--dry takes no callbacks: a dry run shows memory only. See memtools dry-run --help.")
        return _replaced_by([sys.executable, "-m", "lightning_memtools", "dry-run", *script], {VARIABLE: "0"})
    ours = [each for each in entry_points(group=_GROUP) if each.value.startswith("lightning_memtools.")]
    if not ours:
        raise UsageError("Lightning does not see lightning_memtools; install it again: pip install lightning_memtools.")
    asked = {VARIABLE: json.dumps(options) if options else "1"}
    return _replaced_by([sys.executable, *script], asked)


def _options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Check and return the command-line options on callbacks: which to add, which to leave out, and their arguments."""
    arguments: dict[str, dict[str, Any]] = {}
    for text in chosen.arguments or ():
        import yaml  # noqa: PLC0415, --help does not need it

        target, equals, value = text.partition("=")
        name, dot, argument = target.partition(".")
        if not (equals and dot and name and argument):
            raise UsageError(f"--set {text}: write NAME.ARGUMENT=VALUE, such as HaltOnNaN.max_skips=3.")
        try:
            arguments.setdefault(name, {})[argument] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {text}: the value is no YAML: {error}") from error
    given = {"add": chosen.add, "leave_out": chosen.leave_out, "arguments": arguments}
    options = {name: value for name, value in given.items() if value}
    if options:
        from lightning_memtools.verdict.in_trainer.asked_callbacks import asked_callbacks  # noqa: PLC0415, it imports torch

        try:
            asked_callbacks(**options)
        except ValueError as error:
            raise UsageError(str(error)) from error
    return options


def _replaced_by(command: list[str], variables: dict[str, str]) -> int:
    """Replace this process with a command; add `variables` to the environment. On Windows, return the exit status."""
    environment = os.environ | variables
    if os.name == "posix":
        os.execve(command[0], command, environment)  # noqa: S606, the user's own script
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603, as above
