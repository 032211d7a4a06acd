"""`memtools dry-run SCRIPT`: run a training script on PyTorch's own CUDA code without a GPU, and see what it needs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict

from lightning_memtools.budgets.judgement import over_budget, parse_budget
from lightning_memtools.cli.targets import UsageError, say
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.null_cuda.dry_run.api import dry_run
from lightning_memtools.null_cuda.dry_run.result import FAILED, FITS, OUT_OF_MEMORY, OVER_BUDGET, DryRunResult
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.reporting.tables import console_table

_WITH_ADVICE = "plan"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `dry-run` to the parser of `memtools`."""
    parser = commands.add_parser(
        "dry-run",
        aliases=[_WITH_ADVICE],
        help="run a training script on PyTorch's CUDA code without a GPU",
        usage="%(prog)s [OPTIONS] SCRIPT [ARGS ...]",
        description="Run an unchanged training script on CUDA devices that account for memory and compute nothing. "
        f"`memtools {_WITH_ADVICE}` is `memtools dry-run --advise`. Exit status: 0 the run fits, 3 it ran out of "
        "memory, 4 it takes more than --at-most, 1 the script failed, 2 it could not be started.",
    )
    parser.add_argument("--gpu", metavar="NAME", help="the GPU, such as 'RTX 4090' (default: an A100 of 1 TiB)")
    parser.add_argument("--capacity", metavar="SIZE", help="bytes of each device, such as 24GiB (default: the GPU's)")
    parser.add_argument("--advise", action="store_true", help="try what makes the script fit, for minutes")
    parser.add_argument("--at-most", metavar="SIZE", help="a budget for the peak of allocated memory")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices there are (default: 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that is run (default: 0)")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps of each stage (default: 3); 0 for the script's own"
    )
    parser.add_argument("--directory", metavar="DIR", help="where logs and checkpoints go (default: temporary)")
    parser.add_argument("--json", action="store_true", help="print JSON, and the script's output to stderr")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the training script, as it is")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Run the training script without a GPU, print the memory that it needs, and return the exit status."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    # A session of its own does not end with this process: it has to be ended.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        budget = None if chosen.at_most is None else parse_budget(chosen.at_most, what="--at-most")
        result = dry_run(
            chosen.script,
            chosen.arguments,
            module=chosen.module,
            gpu=chosen.gpu,
            capacity=chosen.capacity,
            devices=chosen.devices,
            rank=chosen.rank,
            steps=chosen.steps or None,
            advise=chosen.advise or chosen.command_line[0] == _WITH_ADVICE,
            directory=chosen.directory,
            output=sys.stderr if chosen.json else None,
        )
    except KeyboardInterrupt as error:
        print("memtools: interrupted; the script was ended.", file=sys.stderr)  # noqa: T201, a command prints
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except (DryRunError, UsageError, ValueError, FileNotFoundError) as error:
        print(f"memtools: {error}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    if chosen.json:
        print(json.dumps(asdict(result), indent=1))  # noqa: T201
    else:
        _show(result)
    if not result.fits:
        return result.status or FAILED
    return FITS if budget is None else _held_to(result, budget)


def _held_to(result: DryRunResult, budget: int) -> int:
    """Check the peak memory against a budget in bytes: print an error if it is too high, and return the exit status."""
    peak = result.peak
    if not peak.allocated:
        print("memtools: --at-most: nothing was allocated on the device, so nothing is within it.", file=sys.stderr)  # noqa: T201
        return FAILED
    if peak.allocated <= budget:
        return FITS
    print(f"memtools: --at-most: {over_budget(peak, budget)}", file=sys.stderr)  # noqa: T201
    return OVER_BUDGET


def _show(result: DryRunResult) -> None:
    ranks = f", rank {result.rank} of {result.devices}" if result.devices > 1 else ""
    where = f"{result.device}, {format_size(result.capacity_bytes)}{ranks}"
    say(f"\nDry run on {where}: PyTorch's own CUDA code, no GPU, nothing computed.")
    say(result.verdict)
    if result.stages:
        say(console_table(result.table()))
    too_small, enough = result.smallest_fitting
    if enough is not None:
        smaller = f"; {too_small} is too small" if too_small else ""
        say(
            f"Estimate of the smallest known GPU that it fits, by these requests: {enough}{smaller}. "
            f"Other GPUs run other kernels: check with --gpu '{enough}'."
        )
    elif too_small is not None:
        say(f"By these requests it fits no GPU of the table; the largest is {too_small}.")
    if result.advice:
        say("What was tried to make it fit:", console_table(result.advice_table()))
        say(*(f"{i}. {one.code}" for i, one in enumerate(result.advice, 1) if one.code and one.fits is not False))
    elif result.status == OUT_OF_MEMORY:
        say("No change was tried: changes are tried on a step of a Trainer, and memory ran out elsewhere.")
    if result.report:
        say(f"Out-of-memory report: {result.report}")
    for note in result.notes:
        say(note)
    say(f"Files of the run: {result.directory}")
