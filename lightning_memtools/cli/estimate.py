"""`memtools estimate MODULE:CALLABLE`: predicts the memory of a training step, and lists the GPUs it fits on."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from lightning_memtools.cli.targets import Target, UsageError, require_folder_of, say, working
from lightning_memtools.memory.sizes import find_gpu
from lightning_memtools.null_cuda.launch import environment, is_on_null_device, null_devices
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.reporting.tables import Table, console_table

if TYPE_CHECKING:
    from lightning_memtools.estimate import MemoryEstimate

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
STAGES = ("train", "val", "test", "predict")
TARGET = Target("estimate_memory", ("model", "batch"), "step")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `estimate` to the parser of `memtools`."""
    parser = commands.add_parser(
        "estimate",
        help="predict the memory of a training step, without a GPU",
        usage="%(prog)s [OPTIONS] MODULE:CALLABLE",
        description="Predict the memory of a training step, and list the GPUs it fits on.",
    )
    TARGET.add_to(parser, "Build large models on the meta device.")
    parser.add_argument("--optimizer", metavar="NAME", help="a class of torch.optim (default: the module's, or none)")
    parser.add_argument("--precision", choices=PRECISIONS, metavar="TYPE", help="such as bf16-mixed (default: 32-true)")
    parser.add_argument("--stage", choices=STAGES, metavar="STAGE", help="train, val, test or predict (default: train)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps or evaluation batches (default: 2)")
    parser.add_argument("--accumulate", type=int, metavar="N", help="batches per optimizer step (default: 1)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this norm")
    parser.add_argument("--allocator", metavar="CONF", help="as in PYTORCH_ALLOC_CONF")
    parser.add_argument("--capacity", metavar="SIZE", help='a size such as 24GiB, or a GPU such as "RTX 4090"')
    parser.add_argument("--max-batch", action="store_true", help="find the largest batch for --capacity")
    parser.add_argument("--all-gpus", action="store_true", help="list every known GPU, not only those near the limit")
    parser.add_argument("--modules", type=int, default=10, metavar="N", help="show the N largest modules (default: 10)")
    parser.add_argument("--snapshot", metavar="FILE", help="write a snapshot for pytorch.org/memory_viz")
    parser.add_argument("--json", action="store_true", help="print the peak as JSON, for memtools diff")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Estimate the memory of a training or evaluation step, print the result, and return the exit status.

    Raises:
        UsageError: MODULE:CALLABLE does not exist or returns something unexpected, or an option is invalid.
    """
    require_folder_of(chosen.snapshot)
    if not is_on_null_device() and not _torch_starts():
        # A CUDA build of torch without NVIDIA's libraries can be imported with the stubs alone.
        try:
            variables = environment(null_devices())
        except DryRunError as error:
            raise UsageError(f"The installed torch cannot be imported without what a dry run needs. {error}") from error
        again = [sys.executable, "-m", "lightning_memtools.cli.main", *chosen.command_line]
        return subprocess.run(again, env=variables, check=False).returncode  # noqa: S603
    _estimate(chosen)
    return 0


def _torch_starts() -> bool:
    try:
        import torch  # noqa: F401, PLC0415, --help does not need it
    except ImportError:
        return False
    return True


def _made(chosen: argparse.Namespace) -> MemoryEstimate:
    from lightning_memtools.estimate import estimate_memory  # noqa: PLC0415, --help needs it not

    options = ("precision", "stage", "steps", "accumulate", "clip", "allocator", "capacity")
    arguments = TARGET.arguments(chosen, options)
    if chosen.optimizer is not None:
        arguments["optimizer"] = optimizer_of(chosen.optimizer)
    try:
        return estimate_memory(**arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _estimate(chosen: argparse.Namespace) -> None:
    from lightning_memtools.budgets.measuring import peak_of_estimate  # noqa: PLC0415, as above

    if chosen.max_batch and chosen.capacity is None:
        raise UsageError("--max-batch needs --capacity, such as --capacity 24GiB.")
    with working("The step is traced"):
        estimate = _made(chosen)
    if chosen.snapshot:
        estimate.as_snapshot(chosen.snapshot)
    if chosen.json:
        print(json.dumps(peak_of_estimate(estimate, gpu=chosen.capacity).as_json(), indent=1))  # noqa: T201, a command
        return
    word = estimate.word_on_capacity()
    if word:
        say(word)
    say(console_table(estimate.summary_table()))
    say(f"The peak is reached at {estimate.peak_at}.")
    for note in estimate.notes:
        say(f"Note: {note}")
    say(console_table(estimate.module_table(chosen.modules)))
    rows = [(name, "yes" if fits else "no") for name, fits in estimate.fitting_gpus()]
    say(
        console_table(
            Table(("GPU", "fits"), rows if chosen.all_gpus else around_the_boundary(rows, _gpu_named(chosen.capacity)))
        )
    )
    if chosen.max_batch:
        try:
            with working("The largest batch is looked for"):
                largest = estimate.max_batch_size(chosen.capacity)
        except ValueError as error:
            raise UsageError(str(error)) from error
        say(f"Largest batch for {chosen.capacity}: {largest or 'none, not even one sample'}")
    if chosen.snapshot:
        say(f"Snapshot for https://pytorch.org/memory_viz: {chosen.snapshot}")


def _gpu_named(capacity: str | None) -> str | None:
    gpu = None if capacity is None else find_gpu(capacity)
    return None if gpu is None else gpu.name


def around_the_boundary(rows: list[tuple[str, str]], asked: str | None = None, n: int = 3) -> list[tuple[str, str]]:
    """Return the rows of the `n` largest GPUs that are too small, and of the `n` smallest that are large enough.

    Also return the row of the GPU `asked`. Each row is (GPU name, "yes" if the step fits, else "no").
    """
    first = next((i for i, (_, fits) in enumerate(rows) if fits == "yes"), len(rows))
    return [row for i, row in enumerate(rows) if first - n <= i < first + n or row[0] == asked]


def optimizer_of(name: str) -> Any:
    """Return the optimizer class of torch.optim that has this name, such as "AdamW".

    Raises:
        UsageError: There is no such class.
    """
    import torch  # noqa: PLC0415, --help does not need it

    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {name!r}. Write the class's name, such as AdamW or SGD.")
    return found
