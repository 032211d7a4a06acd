"""`memtools estimate MODULE:CALLABLE`: predicts the memory of a training step, and lists the GPUs it fits on."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_memtools.reporting.tables import Table, console_table

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
STAGES = ("train", "val", "test", "predict")


class UsageError(Exception):
    """The command line is wrong; the message says how, and what to do."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "estimate",
        help="predict the memory of a training step, without a GPU",
        description=__doc__,
    )
    parser.add_argument(
        "target",
        metavar="MODULE:CALLABLE",
        help="a function without arguments that returns (model, batch), or (model, batch, step), or a dict with the "
        "arguments of estimate_memory. Build large models under torch.device('meta').",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="a class of torch.optim, such as AdamW")
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--accumulate", type=int, metavar="N", help="batches per optimizer step")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this norm")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--allocator", metavar="CONF", help="as PYTORCH_ALLOC_CONF, such as expandable_segments:True")
    parser.add_argument("--capacity", metavar="SIZE", help='a size such as "24GiB", or a GPU such as "RTX 4090"')
    parser.add_argument("--max-batch", action="store_true", help="find the largest batch for --capacity")
    parser.add_argument("--modules", type=int, default=10, metavar="N", help="show the N modules that save most")
    parser.add_argument("--snapshot", metavar="FILE", help="write a snapshot for pytorch.org/memory_viz")
    parser.add_argument("--picture", metavar="FILE.svg", help="write a picture of memory over the steps")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:  # noqa: C901, one branch per option
    """Estimate, and print the result.

    Raises:
        UsageError: The target cannot be found or returns something else.
    """
    import rich.console  # noqa: PLC0415, --help needs none of these

    from lightning_memtools.estimate import estimate_memory  # noqa: PLC0415

    if chosen.max_batch and chosen.capacity is None:
        raise UsageError("--max-batch needs --capacity, such as --capacity 24GiB.")
    arguments = arguments_of(load(chosen.target)(), chosen.target)
    for name in ("precision", "stage", "steps", "accumulate", "clip", "device", "allocator", "capacity"):
        if getattr(chosen, name) is not None:
            arguments[name] = getattr(chosen, name)
    if chosen.optimizer is not None:
        arguments["optimizer"] = optimizer_of(chosen.optimizer)
    try:
        estimate = estimate_memory(**arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = rich.console.Console()
    console.print(console_table(estimate.summary_table()))
    console.print(f"The peak is reached at {estimate.peak_at}.", markup=False)
    word = estimate.word_on_capacity()
    if word:
        console.print(word, markup=False)
    for note in estimate.notes:
        console.print(f"Note: {note}", markup=False)
    console.print(console_table(estimate.module_table(chosen.modules)))
    rows = [(name, "yes" if fits else "no") for name, fits in estimate.fitting_gpus()]
    console.print(console_table(Table(("GPU", "fits"), rows)))
    if chosen.max_batch:
        console.print(f"Largest batch for {chosen.capacity}: {estimate.max_batch_size(chosen.capacity)}", markup=False)
    if chosen.snapshot:
        estimate.as_snapshot(chosen.snapshot)
        console.print(f"Snapshot for https://pytorch.org/memory_viz: {chosen.snapshot}", markup=False)
    if chosen.picture:
        estimate.save_picture(chosen.picture)
        console.print(f"Picture: {chosen.picture}", markup=False)


def load(target: str) -> Callable[[], Any]:
    """Return the callable that MODULE:CALLABLE names; modules are also looked for in the working directory.

    Raises:
        UsageError: There is none.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise UsageError(f"{target!r} names no callable: write MODULE:CALLABLE, such as my_project:model_and_batch.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(f"No module {error.name!r} here or among what is installed. You are in {here}.") from error
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UsageError(f"Module {module_name!r} has no {name!r}.")
    if not callable(found):
        raise UsageError(f"{target} is {found!r:.80}, which cannot be called: name a function.")
    function: Callable[[], Any] = found
    return function


def arguments_of(returned: Any, target: str) -> dict[str, Any]:
    """Return the arguments of estimate_memory that a target returned.

    Raises:
        UsageError: It is none of the accepted forms.
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple) and len(returned) in {2, 3}:
        return dict(zip(("model", "batch", "step"), returned, strict=False))
    raise UsageError(
        f"{target} returned {returned!r:.80}. Return (model, batch), (model, batch, step), or a dict with "
        "the arguments of estimate_memory."
    )


def optimizer_of(name: str) -> Any:
    """Return the class of that name in torch.optim.

    Raises:
        UsageError: There is none.
    """
    import torch  # noqa: PLC0415, --help does not need it

    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {name!r}. Write the class's name, such as AdamW or SGD.")
    return found
