"""Measures the peak of a block of code, on the process's CUDA device, or else on a simulated one."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memtools._torch import (
    clear_cublas_workspaces,
    cuda_memory_snapshot,
    in_backward,
    record_cuda_history,
    stop_cuda_history,
)
from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.estimate.memory_estimate import MemoryEstimate
from lightning_memtools.estimate.trace_reading import holders_at, place_at
from lightning_memtools.memory.allocator import Block, cublas_workspace_bytes, replay
from lightning_memtools.memory.allocator.memory_snapshot import config_of, trace_until
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.history_owners import OwnerNotes
from lightning_memtools.memory.peak_holders import PeakHolder, held_by
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.memory.step_snapshot import ModuleLabels
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.ledger import DeviceListener
from lightning_memtools.memory.virtual.module_scopes import OPTIMIZER
from lightning_memtools.null_cuda.launch import DEFAULT_GPU
from lightning_memtools.simulation.recording import AllocationRecorder

_MOST_ENTRIES = 10_000_000
_STAGE = "code"


def peak_of_estimate(estimate: MemoryEstimate, *, gpu: str | None) -> PeakMemory:
    """Return the peak of an estimate as a PeakMemory."""
    return PeakMemory(
        allocated=estimate.peak_allocated,
        reserved=estimate.peak_reserved,
        engine="simulation",
        torch=torch.__version__.partition("+")[0],
        gpu=gpu or "",
        peak_at=str(estimate.peak_at),
        categories={name: size for name, size in estimate.composition.items() if size},
        modules=held_by(estimate.holders, "module"),
        lines=held_by(estimate.holders, "line"),
        notes=estimate.notes,
    )


@contextmanager
def measured_code(gpu: str | None) -> Iterator[Measuring]:
    """Context manager: measure the peak memory of the code in the `with` block.

    Earlier allocations do not count. Garbage is collected after each optimizer step and at no other time, so that the
    peak depends on nothing but the code.

    Args:
        gpu: The GPU to measure for; None for this process's device, or an A100 if it has none.

    Raises:
        ValueError: This process has a CUDA device of another type than `gpu`.
    """
    measuring: Measuring
    if torch.cuda.is_available():
        _check_device(gpu)
        measuring = _OnCuda(gpu)
    else:
        measuring = _OnVirtualDevice(gpu)
    gc.collect()
    was_on = gc.isenabled()
    with gc_frozen():
        gc.disable()
        try:
            with measuring, _used_objects(measuring):
                yield measuring
        finally:
            if was_on:
                gc.enable()


def _check_device(gpu: str | None) -> None:
    here, wanted = torch.cuda.get_device_properties(torch.cuda.current_device()), find_gpu(gpu)
    kind = here.multi_processor_count, here.major, here.minor
    if wanted is not None and kind != (wanted.multiprocessors, *wanted.capability):
        raise ValueError(
            f"gpu={gpu!r}, and this process's CUDA device is like {here.name}. Start it with `python -m "
            f"lightning_memtools.null_cuda --gpu '{gpu}' -m pytest`, or hide the device for a simulation: "
            "CUDA_VISIBLE_DEVICES= pytest."
        )


@contextmanager
def _used_objects(measuring: Measuring) -> Iterator[None]:
    """Report to `measuring` the modules that run and the optimizers that step, including those created earlier."""
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    roots: list[weakref.ref[nn.Module]] = []
    used: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def see(module: nn.Module, _args: Any) -> None:
        if module not in seen:
            roots.append(weakref.ref(module))
            seen.update(module.modules())
            measuring.on_module(module)

    def end_step(optimizer: Optimizer, *_: Any) -> None:
        used.add(optimizer)
        measuring.on_step([module for module in (root() for root in roots) if module is not None], list(used))
        gc.collect()

    hooks = register_module_forward_pre_hook(see), register_optimizer_step_post_hook(end_step)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _OnVirtualDevice:
    """Measures code on a simulated device."""

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu or ""
        shape = GpuShape.of(find_gpu(gpu))
        workspace = cublas_workspace_bytes(compute_capability=shape.compute_capability)
        self._device = VirtualDevice(cuda_like=True, cublas_workspace=f"{workspace}B")
        self._device.gpu = shape
        self._recorder = AllocationRecorder(self._device.allocator)
        self.lines = self._recorder.lines
        self._device.listen(_Phases(self._recorder))

    def __enter__(self) -> Self:
        self._device.__enter__()
        self.lines.__enter__()
        self._recorder.begin("forward", 0)
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.finish(self._device)
        self._device.__exit__()
        self.lines.__exit__(*error)

    def on_module(self, module: nn.Module) -> None:
        self._device.track(module)

    def on_step(self, _modules: Sequence[nn.Module], _optimizers: Sequence[Optimizer]) -> None:
        # It charges gradients and optimizer states to their modules, as long as these live.
        self._device.composition()

    def peak(self) -> PeakMemory:
        event = self._recorder.peak
        holders, peak_at = holders_at(self._recorder, event, ""), str(place_at(self._recorder, event, ""))
        return _peak_memory("simulation", self._gpu, self._device.stats(), peak_at, holders)


class _Phases(DeviceListener):
    """Passes a device's events to a recorder, and infers the phase from them: forward, backward or optimizer."""

    def __init__(self, recorder: AllocationRecorder) -> None:
        self._recorder = recorder

    def on_operator(self, operator: Any) -> None:
        self._recorder.on_operator(operator)

    def on_module(self, name: str) -> None:
        self._recorder.on_module(name)

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        phase = "backward" if in_backward() else "optimizer" if module == OPTIMIZER else "forward"
        if phase != self._recorder.phase:
            ended = self._recorder.phase == "optimizer"
            operation = self._recorder.operation
            self._recorder.begin(phase, self._recorder.step + ended)
            self._recorder.operation = operation
        self._recorder.on_allocation(block, category, module)

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        self._recorder.on_free(block_id, category, module)


class _OnCuda:
    """Measures code on this process's CUDA device: its allocations are replayed on an empty simulated allocator."""

    def __init__(self, gpu: str | None) -> None:
        here = torch.cuda.get_device_name().removesuffix(" (dry run)")
        self._gpu = gpu or (DEFAULT_GPU if here == "no limit" else here)
        self._owners = OwnerNotes()
        self.lines = self._owners.lines
        self._labels: list[ModuleLabels] = []
        self._snapshot: dict[str, Any] = {}

    def __enter__(self) -> Self:
        clear_cublas_workspaces()
        self.lines.__enter__()
        self._owners.enter(_STAGE)
        self._begin = time.time_ns() // 1000
        record_cuda_history(_MOST_ENTRIES)
        return self

    def on_module(self, module: nn.Module) -> None:
        # Without a phase: the label that autograd's thread got in a backward would stay with it.
        self._labels.append(ModuleLabels(module))

    def on_step(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._owners.note(_STAGE, model, optimizers, None)

    def __exit__(self, *error: object) -> None:
        snapshot = cuda_memory_snapshot()
        stop_cuda_history()
        for labels in self._labels:
            labels.remove()
        self.lines.__exit__(*error)
        history = snapshot["device_traces"][torch.cuda.current_device()]
        self._snapshot = {
            "device_traces": [_own_entries([entry for entry in history if entry["time_us"] >= self._begin])],
            "segments": [],
            "allocator_settings": snapshot.get("allocator_settings", {}),
        }

    def peak(self) -> PeakMemory:
        (entries,) = self._snapshot["device_traces"]
        end = entries[-1]["time_us"] + 1 if entries else 0
        trace = trace_until(self._snapshot, config_of(self._snapshot), capacity=None, used_by_others=0, until=end)
        holders, peak_at = self._owners.holders(entries).get(_STAGE, ()), self._owners.moment(entries, _STAGE)
        return _peak_memory("cuda", self._gpu, replay(trace).stats, peak_at, holders)


def _peak_memory(engine: str, gpu: str, stats: MemoryStats, peak_at: str, holders: Sequence[PeakHolder]) -> PeakMemory:
    return PeakMemory(
        allocated=stats.peak_allocated or 0,
        reserved=stats.peak_reserved or 0,
        engine=engine,
        torch=torch.__version__.partition("+")[0],
        gpu=gpu,
        peak_at=peak_at,
        categories=held_by(holders, "category"),
        modules=held_by(holders, "module"),
        lines=held_by(holders, "line"),
    )


def _own_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an allocation history without the frees of blocks that were allocated before it began."""
    made: set[int] = set()
    kept = []
    for entry in entries:
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        elif entry["action"].startswith("free"):
            if entry["addr"] not in made:
                continue
            if entry["action"] == "free_completed":
                made.discard(entry["addr"])
        kept.append(entry)
    return kept


Measuring = _OnCuda | _OnVirtualDevice
"""Measures the code in a `with` statement."""
