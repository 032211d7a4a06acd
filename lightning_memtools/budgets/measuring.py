"""Measures the peak of a block of code on a simulated device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memtools._torch import in_backward
from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.estimate.memory_estimate import MemoryEstimate
from lightning_memtools.estimate.trace_reading import holders_at, place_at
from lightning_memtools.memory.allocator import Block, cublas_workspace_bytes
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.peak_holders import held_by
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.ledger import DeviceListener
from lightning_memtools.memory.virtual.module_scopes import OPTIMIZER
from lightning_memtools.simulation.recording import AllocationRecorder


def peak_of_estimate(estimate: MemoryEstimate, *, gpu: str | None) -> PeakMemory:
    """Convert the peak in a memory estimate to a PeakMemory. `gpu` names the GPU of the estimate."""
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


class MeasuredCode(DeviceListener):
    """Records the memory that code allocates on a simulated device, divided into forward, backward and optimizer step.

    Args:
        gpu: The name of the GPU to simulate; None for an A100.

    Attributes:
        n_steps: The number of optimizer steps.
    """

    def __init__(self, gpu: str | None) -> None:
        self.n_steps = 0
        self._gpu = gpu or ""
        shape = GpuShape.of(find_gpu(gpu))
        workspace = cublas_workspace_bytes(compute_capability=shape.compute_capability)
        self._device = VirtualDevice(cuda_like=True, cublas_workspace=f"{workspace}B")
        self._device.gpu = shape
        self._recorder = AllocationRecorder(self._device.allocator)
        self._device.listen(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: record the code in the `with` block. Earlier allocations do not count.

        Garbage is collected after each optimizer step and at no other time, so that the peak depends on nothing but
        the code.

        Raises:
            ValueError: The code put tensors on a CUDA device, which is not measured.
        """
        gc.collect()
        was_on, on_cuda = gc.isenabled(), _cuda_allocations()
        seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def see(module: nn.Module, _args: Any) -> None:
            if module not in seen:
                seen.update(module.modules())
                self._device.track(module)

        with gc_frozen(), self._device, self._recorder.lines:
            hooks = register_module_forward_pre_hook(see), register_optimizer_step_post_hook(self._end_step)
            gc.disable()
            self._recorder.begin("forward", 0)
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                self._recorder.finish(self._device)
                if was_on:
                    gc.enable()
        if _cuda_allocations() > on_cuda:
            raise ValueError(
                "the code put tensors on a CUDA device, which is not measured. Hide it: CUDA_VISIBLE_DEVICES="
            )

    def _end_step(self, *_: Any) -> None:
        self.n_steps += 1
        # It charges gradients and optimizer states to their modules, as long as these live.
        self._device.composition()
        gc.collect()

    def peak(self) -> PeakMemory:
        """Return the peak of the code that ran."""
        recorder, stats, event = self._recorder, self._device.stats(), self._recorder.peak
        holders = holders_at(recorder, event, "")
        return PeakMemory(
            allocated=stats.peak_allocated or 0,
            reserved=stats.peak_reserved or 0,
            engine="simulation",
            torch=torch.__version__.partition("+")[0],
            gpu=self._gpu,
            peak_at=str(place_at(recorder, event, "")),
            categories=held_by(holders, "category"),
            modules=held_by(holders, "module"),
            lines=held_by(holders, "line"),
        )

    # --- called by the device

    def on_operator(self, operator: Any) -> None:
        """Record that an operator runs."""
        self._recorder.on_operator(operator)

    def on_module(self, name: str) -> None:
        """Record that the module `name` runs from now on."""
        self._recorder.on_module(name)

    def on_allocation(self, block: Block, category: Category | None, module: str) -> None:
        """Record an allocation. If it is the first in a new phase, such as backward, record that the phase begins."""
        phase = "backward" if in_backward() else "optimizer" if module == OPTIMIZER else "forward"
        if phase != self._recorder.phase:
            ended = self._recorder.phase == "optimizer"
            operation = self._recorder.operation
            self._recorder.begin(phase, self._recorder.step + ended)
            self._recorder.operation = operation
        self._recorder.on_allocation(block, category, module)

    def on_free(self, block_id: int, category: Category | None, module: str) -> None:
        """Record that a block is freed."""
        self._recorder.on_free(block_id, category, module)


def _cuda_allocations() -> int:
    """Return how many blocks this process has allocated on its CUDA device so far."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))  # there are none before it is initialized
