"""`memtools dry-run SCRIPT`: run a training script on PyTorch's own CUDA code without a GPU, and see what it needs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from lightning_memtools.budgets.judgement import over_budget, parse_budget
from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.cli.targets import UsageError, require_folder_of, say
from lightning_memtools.memory.sizes import context_bytes, format_size, is_count
from lightning_memtools.null_cuda.launch import USERS, environment, null_devices
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.reporting.console import progress_printed
from lightning_memtools.reporting.tables import Table, console_table, markdown_table, shown_as

_CHILD = "lightning_memtools.cli.dry_run_child"
FITS, FAILED, OUT_OF_MEMORY, OVER_BUDGET = 0, 1, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunSpec:
    """The task of the child process, as JSON carries it there.

    Attributes:
        program: A script, or a module's name with `module`.
        arguments: The program's own arguments.
        module: Whether the program is a module, as with ``python -m``.
        steps: Optimizer steps of each training run and batches of each evaluation run; None for the Trainer's own.
        devices: How many devices, and so ranks, there are.
        rank: The rank that is run.
        directory: Where everything is written that the run would have written elsewhere.
        snapshot: Where to write torch's memory snapshot, if anywhere.
        checks_seconds: The processor's time for the advice of a report; None for its own.
        strategy: The strategy of Trainers that name none; None for Lightning's choice.
    """

    program: str
    arguments: list[str]
    module: bool
    steps: int | None
    devices: int
    rank: int
    directory: str
    snapshot: str | None
    checks_seconds: float | None = None
    strategy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunStage:
    """The peaks of one stage of a run, in bytes.

    Attributes:
        stage: train, val, test or predict; "script" for a program without a Trainer.
        peak_allocated: The highest that tensors took.
        peak_reserved: The highest that PyTorch's allocator held.
        by_category: Parameters, buffers, gradients, optimizer state and inputs at the moment of the peak; "activations"
            is the rest: activations and temporary tensors. Empty where the history of allocations was too long to keep.
        by_module: The bytes of each module at that moment: its own parameters, gradients and optimizer state, and what
            its operators have made. What belongs to none has an empty name.
        by_line: The bytes that each line of code has asked for, such as "model.py:48: x = self.norm(x)".
        phase: forward, backward or optimizer: where training's peak was.
    """

    stage: str
    peak_allocated: int
    peak_reserved: int
    by_category: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, int] = field(default_factory=dict, repr=False)
    by_line: dict[str, int] = field(default_factory=dict, repr=False)
    phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAdvice:
    """A change of a run that ran out of memory, as OOMReport tried it.

    Attributes:
        title: The change in a few words.
        code: The code to write in the program.
        fits: Whether it is enough by itself; None where that is not known.
        peak: The step's peak with it in bytes; None where no step was traced.
        price: The computation that it costs, in words; "" for none.
        detail: The result of the check in sentences; where it was not checked, the reason.
    """

    title: str
    code: str
    fits: bool | None
    peak: int | None
    price: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """The result of a dry run.

    Attributes:
        device: The name of the pretended device.
        capacity: Its bytes.
        status: 0 if the run fits, 3 if it ran out of memory, 1 if the program ended with an error of its own.
        error: The error's message, if there was one.
        report: The file of the out-of-memory report, if one was written.
        stages: The peaks of each stage.
        layers: The modules whose outputs and saved tensors keep most, in bytes, largest first.
        smallest_fitting: An estimate by the requests of this run, though another GPU may run other kernels: the names
            of the largest known GPU that does not fit (or None) and of the smallest that does (or None).
        notes: What the reader should know of this run.
        assumed: The lines that read a value that nobody computed, each with what was assumed for it. The run fits if
            these assumptions hold.
        optimizer_steps: The number of optimizer steps that ran; None where the script has no optimizer.
        rank: The rank that was run.
        devices: How many ranks there are.
        directory: Where the run's files are.
        torch: The version of torch.
        advice: Where memory ran out in a Trainer: the changes that OOMReport tried, the best first.
    """

    device: str
    capacity: int
    status: int
    error: str | None = None
    report: str | None = None
    stages: list[DryRunStage] = field(default_factory=list)
    layers: list[tuple[str, int]] = field(default_factory=list)
    smallest_fitting: tuple[str | None, str | None] = (None, None)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    optimizer_steps: int | None = None
    rank: int = 0
    devices: int = 1
    directory: str = ""
    torch: str = ""
    advice: list[DryRunAdvice] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Return whether the run came to its end within the capacity, and trained if it has an optimizer."""
        return self.status == FITS and self.optimizer_steps != 0

    @property
    def verdict(self) -> str:
        """A sentence that says whether the run fits, and on which assumptions that depends."""
        if self.status == OUT_OF_MEMORY:
            return f"It runs out of memory. {self.error}"
        if self.status == FAILED:
            return f"The script ended with an error of its own. {self.error}"
        if self.optimizer_steps == 0:
            return "No optimizer step ran, so that it is not known whether training fits."
        if not any(one.peak_allocated for one in self.stages):
            return "There was nothing to measure."
        if not self.assumed:
            return "It fits."
        return "It fits if what these lines assume of values that nobody computed is true:\n" + "\n".join(
            f"- {one}" for one in self.assumed
        )

    @property
    def peak(self) -> PeakMemory:
        """The highest peak of all stages."""
        none = DryRunStage(stage="", peak_allocated=0, peak_reserved=0)
        highest = max(self.stages, key=lambda one: one.peak_allocated, default=none)
        return PeakMemory(
            allocated=highest.peak_allocated,
            reserved=max((one.peak_reserved for one in self.stages), default=0),
            engine="cuda",
            torch=self.torch,
            gpu=self.device.removesuffix(" (dry run)").removeprefix("no limit"),
            peak_at=", ".join(filter(None, (highest.stage, highest.phase))),
            categories=highest.by_category,
            modules=highest.by_module,
            lines=highest.by_line,
        )

    def table(self) -> Table:
        """Return one row for each stage."""
        rows = [
            (
                one.stage + (f" ({one.phase})" if one.phase else ""),
                format_size(one.peak_allocated),
                format_size(one.peak_reserved),
                ", ".join(f"{name} {format_size(size)}" for name, size in one.by_category.items() if size),
            )
            for one in self.stages
        ]
        return Table(("stage", "peak allocated", "peak reserved", "at the peak"), rows)

    def __str__(self) -> str:
        where = f"Dry run on {self.device}, {format_size(self.capacity)}"
        return f"{where}. {self.verdict}\n\n{markdown_table(self.table())}"

    _repr_html_ = shown_as(__str__)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DryRunResult:
        """Return the result from what `dataclasses.asdict` made of it."""
        return cls(
            **{
                **content,
                "stages": [DryRunStage(**one) for one in content["stages"]],
                "layers": [tuple(one) for one in content["layers"]],
                "smallest_fitting": tuple(content["smallest_fitting"]),
                "advice": [DryRunAdvice(**one) for one in content["advice"]],
            }
        )


def dry_run(
    program: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str | None = None,
    capacity: str | int | None = None,
    devices: int = 1,
    rank: int = 0,
    steps: int | None = 3,
    snapshot: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
    output: IO[Any] | None = None,
    checks_seconds: float | None = None,
    strategy: str | None = None,
) -> DryRunResult:
    """Run a training script on a CUDA device that computes nothing, and return what it needs.

    The script runs unchanged in a child process, on PyTorch's own CUDA code: the real caching allocator, the real
    optimizers, autograd and autocast. Only NVIDIA's libraries are stubs. Everything that is read back from the device
    is zero. Trainers of Lightning are cut to a few steps and write to a directory of their own.

    Args:
        program: The script, or the name of a module.
        arguments: The program's own arguments.
        module: Whether ``program`` is a module's name.
        gpu: The GPU that the device is like, such as "RTX 4090". By default an A100 with 1 TiB, which nothing fills.
        capacity: Another capacity than the GPU's, such as "24GiB".
        devices: How many devices there are; one rank is run for all of them.
        rank: The rank that is run.
        steps: Optimizer steps of each training run, and batches of each evaluation run; None for the script's own.
        snapshot: A file for torch's memory snapshot, for pytorch.org/memory_viz.
        directory: The folder for logs and checkpoints of the run; by default a temporary one.
        cache: The folder where the stubs are kept once they are built.
        output: The file that the script prints to; by default this process's standard output.
        checks_seconds: The processor's seconds that an out-of-memory report may take for its advice; None for its own.
        strategy: The strategy of Trainers that name none, such as "fsdp", on all devices; None for Lightning's choice.

    Raises:
        DryRunError: There is no CUDA build of torch, no compiler, or this is not Linux; or the process died.
        FileNotFoundError: The script or module does not exist.
        ValueError: A GPU's name is not known, or a number is out of its range.
    """
    is_list = isinstance(arguments, Sequence) and not isinstance(arguments, str)
    if not is_list or not all(isinstance(one, str) for one in arguments):
        raise ValueError(f"arguments={arguments!r} is not a list of texts, such as ['--batch-size', '64'].")
    _check_there_is(os.fspath(program), module=module)
    if not is_count(devices):
        raise ValueError(f"devices={devices!r} is not a number of devices. Give 1 or more.")
    if not is_count(rank, least=0) or rank >= devices:
        raise ValueError(f"rank={rank!r}: with devices={devices}, ranks go from 0 to {devices - 1}.")
    if steps is not None and not is_count(steps):
        raise ValueError(f"steps={steps!r}: at least one step has to run. Give a number, or None for the script's own.")
    taken = context_bytes(gpu if capacity is None else capacity)
    found = null_devices(gpu, capacity, count=devices, context_bytes=taken)
    place = Path(directory or tempfile.mkdtemp(prefix="memtools-dry-run-")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    spec = DryRunSpec(
        program=os.fspath(program),
        arguments=list(arguments),
        module=module,
        steps=steps,
        devices=devices,
        rank=rank,
        directory=str(place),
        snapshot=None if snapshot is None else str(Path(snapshot).resolve()),
        checks_seconds=checks_seconds,
        strategy=strategy,
    )
    wanted = place / "dry_run_spec.json"
    wanted.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    result = place / "dry_run.json"
    result.unlink(missing_ok=True)
    users = place / "processes.txt"
    users.unlink(missing_ok=True)
    # A session of its own: whatever the script starts ends with it.
    child = subprocess.Popen(  # noqa: S603, the user's own script
        [sys.executable, "-m", _CHILD, str(wanted)],
        env=environment(found, cache=cache) | {USERS: str(users)},
        start_new_session=True,
        stdout=output,
    )
    try:
        with progress_printed(lambda: f"Dry run of {spec.program}", stream=sys.stderr):
            status = child.wait()
    finally:
        _end_session(child)
    if not result.exists():
        raise DryRunError(
            f"The process of the dry run ended with status {status} and left no result. What it printed stands above."
        )
    return DryRunResult.from_json(json.loads(result.read_text(encoding="utf-8")))


def _check_there_is(program: str, *, module: bool) -> None:
    if not module and not Path(program).is_file():
        raise FileNotFoundError(f"There is no script {program!r}.")
    if module and PathFinder.find_spec(program.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise FileNotFoundError(f"There is no module {program!r} in this folder or in this Python.")


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes it started. Ctrl-C does not reach them, and workers may outlive the script."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command's parser."""
    parser = commands.add_parser(
        "dry-run",
        help="run a training script on PyTorch's CUDA code without a GPU",
        description="Run an unchanged training script on CUDA devices that account for memory and compute nothing. "
        "Exit status: 0 the run fits, 3 it ran out of memory, 4 it takes more than --at-most, 1 the script failed, "
        "2 it could not be started.",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="the GPU that the device is like, such as 'RTX 4090' (default: an A100 of 1 TiB)"
    )
    parser.add_argument("--capacity", metavar="SIZE", help="bytes of each device, such as 24GiB (default: the GPU's)")
    parser.add_argument(
        "--at-most", metavar="SIZE", help="a budget for the peak of allocated memory, such as 22GiB (default: none)"
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many devices there are (default: 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that is run (default: 0)")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N",
        help="optimizer steps and evaluation batches per stage of a Trainer; 0 for the script's own (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--directory", metavar="DIR", help="where the run's logs and checkpoints go (default: a temporary folder)"
    )
    parser.add_argument(
        "--snapshot", metavar="FILE", help="write torch's memory snapshot, for pytorch.org/memory_viz (default: none)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON, and the script's output to stderr (default: a table)",
    )
    add_script_to(parser)
    parser.set_defaults(run=run)


def add_script_to(parser: argparse.ArgumentParser) -> None:
    """Add the script and its own arguments, which come last."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module (default: a file)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script, as it is")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def run_command(program: str, arguments: Sequence[str], **options: Any) -> DryRunResult | int:
    """Return the result of `dry_run` for a command; the exit status where it was interrupted or could not be started.

    What went wrong is on stderr then.
    """

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    # A session of its own does not end with this process: it has to be ended.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return dry_run(program, arguments, **options)
    except KeyboardInterrupt as error:
        print("memtools: interrupted; the script was ended.", file=sys.stderr)  # noqa: T201, a command prints
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    except (DryRunError, UsageError, ValueError, FileNotFoundError) as error:
        print(f"memtools: {error}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def run(chosen: argparse.Namespace) -> int:
    """Run the script, print what was found, and return the exit status."""
    try:
        require_folder_of(chosen.snapshot)
        budget = None if chosen.at_most is None else parse_budget(chosen.at_most, what="--at-most")
    except (UsageError, ValueError) as error:
        print(f"memtools: {error}", file=sys.stderr)  # noqa: T201
        return 2
    result = run_command(
        chosen.script,
        chosen.arguments,
        module=chosen.module,
        gpu=chosen.gpu,
        capacity=chosen.capacity,
        devices=chosen.devices,
        rank=chosen.rank,
        steps=chosen.steps or None,
        snapshot=chosen.snapshot,
        directory=chosen.directory,
        output=sys.stderr if chosen.json else None,
    )
    if isinstance(result, int):
        return result
    if chosen.json:
        print(json.dumps(asdict(result), indent=1))  # noqa: T201
    else:
        _show(result)
    if not result.fits:
        return result.status or FAILED
    return FITS if budget is None else _held_to(result, budget)


def _held_to(result: DryRunResult, budget: int) -> int:
    """Say on stderr if the run takes more than its budget, and return the exit status."""
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
    where = f"{result.device}, {format_size(result.capacity)}{ranks}"
    say(f"\nDry run on {where}: PyTorch's own CUDA code, no GPU, nothing computed.")
    say(result.verdict)
    if result.stages:
        say(console_table(result.table()))
    if result.layers:
        say("Layers that keep most: " + ", ".join(f"{name} {format_size(size)}" for name, size in result.layers[:5]))
    too_small, enough = result.smallest_fitting
    if enough is not None:
        smaller = f"; {too_small} is too small" if too_small else ""
        say(
            f"Estimate of the smallest known GPU that it fits, by these requests: {enough}{smaller}. "
            f"Other GPUs run other kernels: check with --gpu '{enough}'."
        )
    elif too_small is not None:
        say(f"By these requests it fits no GPU of the table; the largest is {too_small}.")
    if result.report:
        say(f"Out-of-memory report: {result.report}")
    for note in result.notes:
        say(note)
    say(f"Files of the run: {result.directory}")
