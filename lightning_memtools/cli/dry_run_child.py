"""The process of a dry run: runs the user's script and writes down what the device saw."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memtools._torch import cuda_memory_snapshot, has_compiled, pretended_ranks, record_cuda_history
from lightning_memtools.cli.dry_run import (
    FAILED,
    FITS,
    OUT_OF_MEMORY,
    DryRunAdvice,
    DryRunResult,
    DryRunSpec,
    DryRunStage,
)
from lightning_memtools.cli.dry_run_trainers import (
    WHOLE_SCRIPT,
    RunObserver,
    cut_trainers_when_imported,
    keep_peaks,
    values_followed,
)
from lightning_memtools.memory.allocator import replay
from lightning_memtools.memory.allocator.memory_snapshot import config_of, trace_until
from lightning_memtools.memory.living_objects import instances_of, outermost
from lightning_memtools.memory.oom_errors import is_out_of_memory
from lightning_memtools.memory.peak_holders import held_by
from lightning_memtools.memory.sizes import context_bytes, known_gpus
from lightning_memtools.null_cuda.launch import USERS
from lightning_memtools.null_cuda.stubs import DryRunError
from lightning_memtools.simulation.known_values import KnownValues


class LoopWatch:
    """Looks at models and optimizers after each step of an optimizer, unless a Trainer runs, which is observed itself.

    Args:
        observer: Is told what is found.

    Attributes:
        n_steps: The number of optimizer steps so far, those of Trainers included.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.n_steps = 0
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))

    def _end_step(self, optimizer: Optimizer) -> None:
        self.n_steps += 1
        if self._observer.is_watching:
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
            models = outermost(instances_of(nn.Module))
            self._models.update(one for one in models if any(id(weight) in trained for weight in one.parameters()))
            # From the second step on: in the first, cuBLAS makes its workspaces within some layer. Hooks would change
            # what is compiled.
            if not has_compiled():
                for model in self._models:
                    self._observer.watch_layers(model)
        self._note()

    def look(self) -> None:
        """Called when the script ends with an error: note models and optimizers if no step was finished."""
        if not self._observer.is_watching and not self._optimizers:
            self._models.update(outermost(instances_of(nn.Module)))
            self._note()

    def _note(self) -> None:
        models = list(self._models)
        self._observer.see(models[0] if len(models) == 1 else nn.ModuleList(models), list(self._optimizers), None)


_LAYERS = 20
_HISTORY_ENTRIES = 2_000_000


@contextmanager
def _as_one_rank(spec: DryRunSpec) -> Iterator[None]:
    """Make this process one rank of several within, as torchrun would start it."""
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


def _run_one_of(spec: DryRunSpec) -> None:
    """Make `torch.multiprocessing.spawn` run this rank alone, in this process."""

    class Ended:
        """The result of `mp.spawn(join=False)`: a context whose processes have already ended."""

        processes: ClassVar[list[Any]] = []

        def join(self, *_args: Any, **_options: Any) -> bool:
            return True

    def start_processes(
        function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> Ended | None:
        if nprocs != spec.devices:
            raise DryRunError(
                f"The script starts {nprocs} processes for as many ranks, and the dry run has --devices "
                f"{spec.devices}: give --devices {nprocs}."
            )
        if spec.rank and not join:
            raise DryRunError("A script that starts its ranks itself and goes on beside them is run as --rank 0 only.")
        function(spec.rank, *args)
        return None if join else Ended()

    modules: tuple[Any, ...] = (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"])
    for module in modules:
        module.start_processes = start_processes


def _other_processes() -> int:
    """Return how many other processes have taken memory of the devices."""
    users = Path(os.environ[USERS])
    return len(set(users.read_text(encoding="ascii").split()) - {str(os.getpid())}) if users.exists() else 0


def _smallest_gpus(snapshot: dict[str, Any], device: int) -> tuple[str | None, str | None]:
    """Find the largest known GPU that the recorded run does not fit, and the smallest that it does fit."""
    entries = snapshot["device_traces"][device]
    if not entries:
        return None, None
    end = entries[-1]["time_us"] + 1
    config = config_of(snapshot)
    gpus = sorted(known_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name))
    context = context_bytes(gpus[0].name)
    trace = trace_until(snapshot, config, capacity=None, used_by_others=context, until=end, device=device)
    low, high = -1, len(gpus)  # gpus[low] is too small, gpus[high] is enough
    while high - low > 1:
        middle = (low + high) // 2
        if replay(trace, capacity=gpus[middle].usable_bytes).completed:
            high = middle
        else:
            low = middle
    return gpus[low].name if low >= 0 else None, gpus[high].name if high < len(gpus) else None


def _run_program(spec: DryRunSpec) -> dict[str, Any]:
    """Run the program and return its global variables: holding them keeps its models and tensors alive."""
    sys.argv = [spec.program, *spec.arguments]
    if spec.module:
        sys.path.insert(0, str(Path.cwd()))
        return runpy.run_module(spec.program, run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(spec.program).resolve().parent))
    return runpy.run_path(spec.program, run_name="__main__")


def _print_error(error: BaseException) -> None:
    """Print the error as Python would have, without the frames that lie outside of the user's script."""
    outer = error.__traceback__
    while outer is not None and outer.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}:
        outer = outer.tb_next
    traceback.print_exception(error.with_traceback(outer or error.__traceback__))


def _judge(error: BaseException) -> tuple[int, str | None]:
    """Return the status and the message of a program that ended with an error, and print it as Python would have."""
    if isinstance(error, SystemExit):
        return (FAILED, f"It ended with exit status {error.code}.") if error.code else (FITS, None)
    if isinstance(error, DryRunError):
        return FAILED, str(error)
    _print_error(error)
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, str(error).partition(" See documentation")[0]
    return FAILED, f"{type(error).__name__}: {error}"


def main(path: str) -> None:
    """Run the task in a spec file, write the result beside it, and end the process."""
    spec = DryRunSpec(**json.loads(Path(path).read_text(encoding="utf-8")))
    with _as_one_rank(spec), values_followed() as known:
        _run(spec, known)


def _run(spec: DryRunSpec, known: KnownValues) -> None:
    observer = RunObserver(spec)
    observer.note("Tensors that are copied from the device hold zeros, unless their values follow from the data alone.")
    if spec.devices > 1:
        observer.note("What NCCL allocates for itself is not counted.")
    _run_one_of(spec)
    cut_trainers_when_imported(observer)
    observer.files.guard_torch()
    loops = LoopWatch(observer)
    keep_peaks(observer)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    record_cuda_history(_HISTORY_ENTRIES)
    observer.owners.enter(WHOLE_SCRIPT)
    # Registered before the script registers its own functions, so it runs after them.
    atexit.register(_end_here)
    observer.owners.lines.__enter__()  # until the process ends
    variables: dict[str, Any] = {}
    steps: int | None = None
    try:
        variables = _run_program(spec)
        status, message = FITS, None
    except BaseException as error:  # noqa: BLE001, the user's error is reported, whatever it is
        loops.look()
        status, message = _judge(error)
    observer.end()
    others = _other_processes()
    if others:
        observer.note(
            f"The script started other processes, of which {others} used the devices. They ran whole and are in none "
            "of these figures: give the script that trains itself, with --devices for its ranks."
        )
    snapshot = cuda_memory_snapshot()
    if loops.n_steps or instances_of(Optimizer):
        steps = loops.n_steps
    del variables
    if not observer.stages:
        _add_whole_script(observer)
        if status == FITS and not others and not observer.stages[WHOLE_SCRIPT].peak_allocated:
            observer.note("Nothing was ever put on a CUDA device: the script trains on the CPU, or does not train.")
    if spec.snapshot is not None:
        Path(spec.snapshot).write_bytes(pickle.dumps(snapshot))
    result = _result_of(observer, snapshot, status, message, optimizer_steps=steps, assumed=list(known.assumed))
    Path(spec.directory, "dry_run.json").write_text(json.dumps(asdict(result)), encoding="utf-8")


def _add_whole_script(observer: RunObserver) -> None:
    """Add a stage with the peaks of a script in which no Trainer ran."""
    observer.take_in_peaks()
    peaks = observer.script_peaks
    observer.stages[WHOLE_SCRIPT] = DryRunStage(
        stage=WHOLE_SCRIPT, peak_allocated=peaks["allocated_bytes"], peak_reserved=peaks["reserved_bytes"]
    )


def _with_composition(observer: RunObserver, snapshot: dict[str, Any]) -> list[DryRunStage]:
    """Return the stages with what their peaks consist of, unless the history of allocations was too long to keep."""
    entries = snapshot["device_traces"][observer.spec.rank]
    if len(entries) >= _HISTORY_ENTRIES:
        return list(observer.stages.values())
    holders = observer.owners.holders(entries)

    def composed(stage: DryRunStage) -> DryRunStage:
        found = holders.get(stage.stage, ())
        sizes = {what: held_by(found, what) for what in ("category", "module", "line")}
        known = {name: size for name, size in sizes["category"].items() if size and name != "activations"}
        rest = max(0, stage.peak_allocated - sum(known.values()))
        return replace(
            stage,
            by_category=known | {"activations": rest} if known else {},
            by_module=sizes["module"],
            by_line=sizes["line"],
        )

    return [composed(stage) for stage in observer.stages.values()]


def _result_of(
    observer: RunObserver, snapshot: dict[str, Any], status: int, error: str | None, **read: Any
) -> DryRunResult:
    spec = observer.spec
    properties = torch.cuda.get_device_properties(spec.rank)
    reports = sorted((Path(spec.directory) / "memtools").glob("oom-*.md")) if status == OUT_OF_MEMORY else []
    layers = sorted(((name, size) for name, size in observer.layers.items() if size > 0), key=lambda one: -one[1])
    return DryRunResult(
        device=properties.name,
        capacity=properties.total_memory,
        status=status,
        error=error,
        report=str(reports[-1]) if reports else None,
        stages=_with_composition(observer, snapshot),
        layers=layers[:_LAYERS],
        smallest_fitting=_smallest_gpus(snapshot, spec.rank) if status == FITS else (None, None),
        notes=observer.notes,
        rank=spec.rank,
        devices=spec.devices,
        directory=spec.directory,
        torch=torch.__version__.partition("+")[0],
        advice=[
            DryRunAdvice(**{name: getattr(one, name) for name in DryRunAdvice.__dataclass_fields__})
            for one in observer.advice()
        ],
        **read,
    )


def _end_here() -> None:
    # Threads of PyTorch's CUDA code may still run, and abort the process when the interpreter tears them down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
