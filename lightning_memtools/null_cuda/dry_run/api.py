"""`dry_run`: runs a training script on PyTorch's CUDA code without a GPU, and returns the memory that it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lightning_memtools.memory.sizes import context_bytes, is_count
from lightning_memtools.null_cuda.dry_run.result import DryRunResult
from lightning_memtools.null_cuda.launch import environment, null_devices
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.reporting.console import progress_printed

_CHILD = "lightning_memtools.null_cuda.dry_run.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunSpec:
    """The arguments of `dry_run` as JSON values, for the child process that runs the script."""

    program: str
    arguments: list[str]
    module: bool
    steps: int | None
    devices: int
    rank: int
    directory: str
    advise: bool


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
    directory: str | os.PathLike[str] | None = None,
    output: IO[Any] | None = None,
) -> DryRunResult:
    """Run a training script on a simulated CUDA device that computes nothing, and return the memory that it needs.

    The script runs unchanged in a child process, on PyTorch's own CUDA code: the real caching allocator, the real
    optimizers, autograd and autocast. Only NVIDIA's libraries are replaced with stubs. All values that are read back
    from the device are zero. Lightning Trainers run only a few steps and write to a separate directory.

    Args:
        program: The path of the script, or the name of a module.
        arguments: The arguments of the program.
        module: Whether ``program`` is the name of a module.
        gpu: The GPU to simulate, such as "RTX 4090". By default an A100 with 1 TiB, so that memory does not run out.
        capacity: The capacity of the device, such as "24GiB"; by default that of the GPU.
        devices: The number of devices, with one rank on each; only one rank is run.
        rank: The rank to run.
        steps: The number of optimizer steps per training run, and of batches per evaluation run; None for no limit.
        advise: If memory runs out in a Trainer, try changes that save memory, for up to two minutes of CPU time.
        directory: The folder for logs and checkpoints of the run; by default a temporary one.
        output: The file that the script prints to; by default this process's standard output.

    Raises:
        DryRunError: There is no CUDA build of torch or no C compiler, this is not Linux, or the child process died.
        FileNotFoundError: The script does not exist.
        ValueError: The name of the GPU is unknown, or a number is out of range.
    """
    if not module and not Path(program).is_file():
        raise FileNotFoundError(f"There is no script {os.fspath(program)!r}.")
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
        advise=advise,
    )
    place.mkdir(parents=True, exist_ok=True)
    wanted, result = place / "dry_run_spec.json", place / "dry_run.json"
    wanted.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    result.unlink(missing_ok=True)
    # A session of its own: whatever the script starts ends with it.
    child = subprocess.Popen(  # noqa: S603, the user's own script
        [sys.executable, "-m", _CHILD, str(wanted)],
        env=environment(found),
        start_new_session=True,
        stdout=output,
    )
    try:
        with progress_printed(lambda: f"Dry run of {spec.program}", stream=sys.stderr):
            status = child.wait()
    finally:
        with suppress(ProcessLookupError):  # Ctrl-C does not reach the session, and workers may outlive the script
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if not result.exists():
        raise DryRunError(
            f"The process of the dry run ended with status {status} and left no result. What it printed stands above."
        )
    return DryRunResult.from_json(json.loads(result.read_text(encoding="utf-8")))
