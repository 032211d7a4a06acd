"""`dry_run`: runs a training script on PyTorch's CUDA code without a GPU, and returns the memory that it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from lightning_memtools.memory.sizes import context_bytes, is_count
from lightning_memtools.null_cuda.dry_run.result import FITS, OUT_OF_MEMORY, DryRunAdvice, DryRunResult
from lightning_memtools.null_cuda.launch import USERS, NullDevices, environment, null_devices
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.reporting.console import progress_printed

_CHILD = "lightning_memtools.null_cuda.dry_run.child"
_ADVICE_SECONDS = 120.0
_RANKS = (2, 4, 8)
"""The numbers of GPUs for which advice tries to shard the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunSpec:
    """The arguments of `dry_run` for the child process that runs the script, as JSON values.

    Attributes:
        checks_seconds: The CPU seconds that an out-of-memory report may spend to try changes; None for the default.
        strategy: The strategy for Trainers to which the script passes none; None for Lightning's default.
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
    advise: bool = False,
    snapshot: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    output: IO[Any] | None = None,
) -> DryRunResult:
    """Run a training script on a simulated CUDA device that computes nothing, and return the memory that it needs.

    The script runs unchanged in a child process, on PyTorch's own CUDA code: the real caching allocator, the real
    optimizers, autograd and autocast. Only NVIDIA's libraries are stubs. All values that are read back from the device
    are zero. Lightning Trainers are cut to a few steps and write to a separate directory.

    Args:
        program: The path of the script, or the name of a module.
        arguments: The arguments of the program.
        module: Whether ``program`` is the name of a module.
        gpu: The GPU to simulate, such as "RTX 4090". By default an A100 with 1 TiB, so that memory does not run out.
        capacity: The capacity of the device, such as "24GiB"; by default that of the GPU.
        devices: The number of devices, with one rank on each; only one rank is run.
        rank: The rank to run.
        steps: Optimizer steps of each training run, and batches of each evaluation run; None for no limit.
        advise: If memory runs out in a Trainer, try changes for up to two minutes of CPU time, and then
            dry-run the script under FSDP on 2, 4 and 8 devices.
        snapshot: A file to which to write torch's memory snapshot, for pytorch.org/memory_viz.
        directory: The folder for logs and checkpoints of the run; by default a temporary one.
        output: The file that the script prints to; by default this process's standard output.

    Raises:
        DryRunError: There is no CUDA build of torch, no C compiler, this is not Linux, or the process died.
        FileNotFoundError: The script or module does not exist.
        ValueError: The name of the GPU is unknown, or a number is out of range.
    """
    if isinstance(arguments, str) or not all(isinstance(one, str) for one in arguments):
        raise ValueError(f"arguments={arguments!r} is not a list of texts, such as ['--batch-size', '64'].")
    _check_there_is(os.fspath(program), module=module)
    if not is_count(devices):
        raise ValueError(f"devices={devices!r} is not a number of devices. Give 1 or more.")
    if not is_count(rank, least=0) or rank >= devices:
        raise ValueError(f"rank={rank!r}: with devices={devices}, ranks go from 0 to {devices - 1}.")
    if steps is not None and not is_count(steps):
        raise ValueError(f"steps={steps!r}: at least one step has to run. Give a number, or None for the script's own.")
    if advise and gpu is None and capacity is None:
        raise ValueError("Advice is on what makes the script fit a GPU: name it, such as gpu='RTX 4090'.")
    taken = context_bytes(gpu if capacity is None else capacity)
    found = null_devices(gpu, capacity, count=devices, context_bytes=taken)
    place = Path(directory or tempfile.mkdtemp(prefix="memtools-dry-run-")).resolve()
    spec = DryRunSpec(
        program=os.fspath(program),
        arguments=list(arguments),
        module=module,
        steps=steps,
        devices=devices,
        rank=rank,
        directory=str(place),
        snapshot=None if snapshot is None else str(Path(snapshot).resolve()),
        checks_seconds=_ADVICE_SECONDS if advise else None,
    )
    result = _run(spec, found, output)
    if advise and result.advice and devices == 1:
        result.advice.extend(_sharded(spec, found))
    return result


def _check_there_is(program: str, *, module: bool) -> None:
    if not module and not Path(program).is_file():
        raise FileNotFoundError(f"There is no script {program!r}.")
    if module and PathFinder.find_spec(program.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise FileNotFoundError(f"There is no module {program!r} in this folder or in this Python.")


def _run(spec: DryRunSpec, devices: NullDevices, output: IO[Any] | int | None) -> DryRunResult:
    """Run the script in a child process, return the result, and end all processes that the child started."""
    place = Path(spec.directory)
    place.mkdir(parents=True, exist_ok=True)
    wanted, result, users = (place / name for name in ("dry_run_spec.json", "dry_run.json", "processes.txt"))
    wanted.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    for record in (result, users):
        record.unlink(missing_ok=True)
    # A session of its own: whatever the script starts ends with it.
    child = subprocess.Popen(  # noqa: S603, the user's own script
        [sys.executable, "-m", _CHILD, str(wanted)],
        env=environment(devices) | {USERS: str(users)},
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


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes it started. Ctrl-C does not reach them, and workers may outlive the script."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _sharded(spec: DryRunSpec, device: NullDevices) -> list[DryRunAdvice]:
    """Dry-run the script under FSDP on 2, 4 and then 8 devices until it fits, without showing the script's output."""
    tried: list[DryRunAdvice] = []
    for ranks in _RANKS:
        place = str(Path(spec.directory) / f"fsdp-{ranks}")
        sharded = replace(spec, devices=ranks, strategy="fsdp", directory=place, snapshot=None, checks_seconds=0.0)
        result = _run(sharded, replace(device, count=ranks), subprocess.DEVNULL)
        fits = {FITS: result.fits or None, OUT_OF_MEMORY: False}.get(result.status)
        advice = DryRunAdvice(
            title=f"Shard over {ranks} of these GPUs",
            code=f'Trainer(strategy="fsdp", devices={ranks})',
            fits=fits,
            peak_bytes=result.peak.allocated if fits else None,
            price="",
            detail=result.verdict,
        )
        tried.append(advice)
        if fits is not False:
            break
    return tried
