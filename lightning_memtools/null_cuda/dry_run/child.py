"""The child process of a dry run: runs the user's script, and writes the memory that it took to a file."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import sys
import traceback
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import cuda_memory_snapshot, pretended_ranks, record_cuda_history
from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.allocator.memory_snapshot import config_of, trace_until
from lightning_memtools.memory.living_objects import instances_of
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.peak_holders import held_by
from lightning_memtools.memory.sizes import Gpu, context_bytes, known_gpus
from lightning_memtools.null_cuda.dry_run.api import DryRunSpec
from lightning_memtools.null_cuda.dry_run.result import (
    FAILED,
    FITS,
    OUT_OF_MEMORY,
    DryRunAdvice,
    DryRunResult,
    DryRunStage,
)
from lightning_memtools.null_cuda.dry_run.run_observer import WHOLE_SCRIPT, RunObserver
from lightning_memtools.null_cuda.dry_run.trainers import cut_trainers_when_imported
from lightning_memtools.oom.actions import Outcome
from lightning_memtools.simulation.followed_functions import FollowedValues
from lightning_memtools.simulation.known_values import KnownValues, values_known

_HISTORY_ENTRIES = 2_000_000


def main(path: str) -> None:
    """Dry-run the program that a spec file describes, and write the result to a file beside it."""
    spec = DryRunSpec(**json.loads(Path(path).read_text(encoding="utf-8")))
    with _as_one_rank(spec), _values_followed() as known:
        observer = RunObserver(spec)
        result = _run(observer, known)
    Path(spec.directory, "dry_run.json").write_text(json.dumps(asdict(result)), encoding="utf-8")


# --- the script's surroundings


@contextmanager
def _as_one_rank(spec: DryRunSpec) -> Iterator[None]:
    """Context manager: make this process one of several ranks, with the variables that torchrun would set."""
    if spec.devices == 1:
        yield
        return
    os.environ |= {
        "RANK": str(spec.rank), "LOCAL_RANK": str(spec.rank), "GROUP_RANK": "0", "WORLD_SIZE": str(spec.devices),
        "LOCAL_WORLD_SIZE": str(spec.devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "dry-run",
    }  # fmt: skip
    torch.cuda.set_device(spec.rank)
    with pretended_ranks(spec.rank, spec.devices):
        yield


@contextmanager
def _values_followed() -> Iterator[KnownValues]:
    """Context manager: track which tensor values are known without a GPU. A call to torch.compile ends this."""
    with values_known() as known, ExitStack() as following:
        following.enter_context(FollowedValues(known))
        original = torch.compile

        @functools.wraps(original)
        def compile_unfollowed(*args: Any, **kwargs: Any) -> Any:
            following.close()
            return original(*args, **kwargs)

        # Both stay until the process ends.
        torch.compile, nn.init.trunc_normal_ = compile_unfollowed, _drawn_once
        yield known


def _drawn_once(  # noqa: PLR0917, torch's own signature
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Tensor:
    """Replace `trunc_normal_`: draw values out of range only once more. A null device cannot say when none is."""
    with torch.no_grad():
        outside = (tensor.normal_(mean, std, generator=generator) < a) | (tensor > b)
        again = torch.empty_like(tensor).normal_(mean, std, generator=generator)
        return tensor.copy_(torch.where(outside, again, tensor)).clamp_(a, b)


# --- the run


def _run(observer: RunObserver, known: KnownValues) -> DryRunResult:
    spec = observer.spec
    observer.note("Tensors that are copied from the device hold zeros, unless their values follow from the data alone.")
    if spec.devices > 1:
        observer.note("What NCCL allocates for itself is not counted.")
    cut_trainers_when_imported(observer)
    observer.files.guard_torch()
    record_cuda_history(_HISTORY_ENTRIES)
    observer.owners.enter(WHOLE_SCRIPT)
    # Registered before the script registers its own functions, so it runs after them.
    atexit.register(_end_here)
    observer.owners.lines.__enter__()  # until the process ends
    variables: dict[str, Any] = {}
    try:
        variables = _run_program(spec)
        status, message = FITS, None
    except BaseException as error:  # noqa: BLE001, the user's error is reported, whatever it is
        status, message = _judge(error)
    observer.end()
    snapshot = cuda_memory_snapshot()
    optimizer_steps = observer.n_steps if observer.n_steps or instances_of(Optimizer) else None
    del variables
    if not observer.stages:
        observer.stages[WHOLE_SCRIPT] = observer.whole_script()
    reports = sorted((Path(spec.directory) / "memtools").glob("oom-*.md")) if status == OUT_OF_MEMORY else []
    properties = torch.cuda.get_device_properties(spec.rank)
    return DryRunResult(
        device=properties.name,
        capacity_bytes=properties.total_memory,
        status=status,
        error=message,
        report=str(reports[-1]) if reports else None,
        stages=_with_holders(observer, snapshot["device_traces"][spec.rank]),
        smallest_fitting=_smallest_gpus(snapshot, spec.rank) if status == FITS else (None, None),
        notes=observer.notes,
        assumed=list(known.assumed),
        optimizer_steps=optimizer_steps,
        rank=spec.rank,
        devices=spec.devices,
        directory=spec.directory,
        torch=torch.__version__.partition("+")[0],
        advice=_advice(observer),
    )


def _run_program(spec: DryRunSpec) -> dict[str, Any]:
    """Run the program and return its global variables, which keep its models and tensors alive."""
    sys.argv = [spec.program, *spec.arguments]
    if spec.module:
        sys.path.insert(0, str(Path.cwd()))
        return runpy.run_module(spec.program, run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(spec.program).resolve().parent))
    return runpy.run_path(spec.program, run_name="__main__")


def _judge(error: BaseException) -> tuple[int, str | None]:
    """Print the traceback of the exception that ended the program; return the exit status and an error message."""
    if isinstance(error, SystemExit):
        return (FAILED, f"It ended with exit status {error.code}.") if error.code else (FITS, None)
    outer = error.__traceback__
    while outer is not None and outer.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}:
        outer = outer.tb_next
    traceback.print_exception(error.with_traceback(outer or error.__traceback__))
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, str(error).partition(" See documentation")[0]
    return FAILED, f"{type(error).__name__}: {error}"


def _end_here() -> None:
    # Threads of PyTorch's CUDA code may still run, and abort the process when the interpreter tears them down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# --- what the device saw


def _with_holders(observer: RunObserver, entries: list[dict[str, Any]]) -> list[DryRunStage]:
    """Return the stages, with their peaks broken down by category, module and line if the history is complete."""
    holders = observer.owners.holders(entries) if len(entries) < _HISTORY_ENTRIES else {}

    def composed(stage: DryRunStage) -> DryRunStage:
        found = holders.get(stage.stage, ())
        known = {name: size for name, size in held_by(found, "category").items() if size and name != "activations"}
        rest = max(0, stage.peak_allocated_bytes - sum(known.values()))
        return replace(
            stage,
            peak_at=observer.owners.moment(entries, stage.stage) if known else "",
            bytes_by_category=known | {"activations": rest} if known else {},
            bytes_by_module=held_by(found, "module"),
            bytes_by_line=held_by(found, "line"),
        )

    return [composed(stage) for stage in observer.stages.values()]


def _smallest_gpus(snapshot: dict[str, Any], device: int) -> tuple[str | None, str | None]:
    """Replay a memory snapshot on known GPUs. Return the largest that is too small and the smallest that suffices."""
    entries = snapshot["device_traces"][device]
    if not entries:
        return None, None
    gpus = sorted(known_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name))
    end, context = entries[-1]["time_us"] + 1, context_bytes(gpus[0].name)
    trace = trace_until(snapshot, config_of(snapshot), capacity=None, used_by_others=context, until=end, device=device)

    def fits(gpu: Gpu) -> bool:
        return replay(trace, capacity=gpu.usable_bytes).completed

    place = bisect_left(gpus, True, key=fits)  # noqa: FBT003, the smallest for which it is True
    return gpus[place - 1].name if place else None, gpus[place].name if place < len(gpus) else None


def _advice(observer: RunObserver) -> list[DryRunAdvice]:
    """Return the changes that the last out-of-memory report tried in order to save memory; [] without a report."""
    tried = next((one.advice for one in reversed(observer.reporting) if one.advice), ())
    fits = {Outcome.ENOUGH: True, Outcome.NOT_ENOUGH: False, Outcome.USELESS: False}
    return [
        DryRunAdvice(
            title=one.title,
            code=one.code,
            fits=fits.get(one.outcome),
            peak_bytes=one.peak,
            price=one.price,
            detail=one.detail,
        )
        for one in tried
    ]


if __name__ == "__main__":
    main(sys.argv[1])
