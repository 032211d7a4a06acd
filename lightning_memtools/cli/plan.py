"""`memtools plan SCRIPT --gpu NAME`: what makes a training script fit a GPU, each change tried and with its line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial

from lightning_memtools.cli.dry_run import (
    FITS,
    OUT_OF_MEMORY,
    DryRunAdvice,
    DryRunResult,
    add_script_to,
    run_command,
)
from lightning_memtools.cli.targets import say
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.tables import Table, console_table

_CHECKS_S = 120.0  # of a processor: the advice is what is wanted here
_RANKS = (2, 4, 8)


def plan_table(result: DryRunResult) -> Table:
    """Return a row for the script as it is, and one for each change that was tried, in the order of their worth."""
    peak = result.peak.allocated
    rows = [("", "as it is", _answer(fits=result.fits), format_size(peak) if result.fits else "", "")]
    rows += [
        (
            str(number),
            one.title,
            _answer(fits=one.fits),
            "" if one.peak is None else format_size(one.peak),
            one.price,
        )
        for number, one in enumerate(result.advice, start=1)
    ]
    return Table(("", "change", "fits", "peak allocated", "extra computation"), rows)


def _sharding(ranks: int, result: DryRunResult) -> DryRunAdvice:
    """Return the change that spreads weights, gradients and optimizer state over devices, as a dry run found it."""
    return DryRunAdvice(
        title=f"Shard over {ranks} of these GPUs",
        code=f'Trainer(strategy="fsdp", devices={ranks})',
        fits=result.fits,
        peak=result.peak.allocated if result.fits else None,
        price="",
        detail=result.verdict,
    )


def _answer(*, fits: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[fits]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "plan",
        help="find what makes a training script fit a GPU",
        description="Dry-run an unchanged training script on a GPU. Where it runs out of memory in a Trainer, list the "
        "changes that were tried on its failed step, the best first, each with its peak, its extra computation, and "
        "the line to write; and dry-run the script under FSDP on 2, 4 and 8 of them. Exit status: 0 the script fits as "
        "it is, 3 it does not, 1 it failed, 2 it could not be started.",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", required=True, help="the GPU, such as 'RTX 4090' (default: none, it has to be given)"
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many there are (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the dry run's result as JSON (default: a table)")
    add_script_to(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Dry-run the script, print the table, and return the exit status."""
    given = {"module": chosen.module, "gpu": chosen.gpu, "output": sys.stderr}
    run_script = partial(run_command, chosen.script, chosen.arguments, **given)
    result = run_script(devices=chosen.devices, checks_seconds=_CHECKS_S)
    if isinstance(result, int):
        return result
    for ranks in _RANKS if result.advice and chosen.devices == 1 else ():
        sharded = run_script(devices=ranks, strategy="fsdp", checks_seconds=0.0)
        if isinstance(sharded, int) or sharded.status not in {FITS, OUT_OF_MEMORY}:
            break
        result.advice.append(_sharding(ranks, sharded))
        if sharded.fits:
            break
    if chosen.json:
        print(json.dumps(asdict(result), indent=1))  # noqa: T201, a command prints
    else:
        _show(result)
    return FITS if result.fits else result.status or 1


def _show(result: DryRunResult) -> None:
    say(f"\nPlan for {result.device}, {format_size(result.capacity)}. {result.verdict}")
    if result.status in {FITS, OUT_OF_MEMORY}:
        say(console_table(plan_table(result)))
    for number, one in enumerate(result.advice, start=1):
        if one.code and one.fits is not False:
            say(f"{number}. {one.code}")
    if result.status == OUT_OF_MEMORY and not result.advice:
        say("Nothing was tried: changes are tried on a step of a Trainer, and memory ran out elsewhere.")
    if result.report:
        say(f"The changes in sentences: {result.report}")
