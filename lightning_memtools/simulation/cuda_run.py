"""Runs the user's step on PyTorch's own CUDA code, on a device that computes nothing, and leaves the objects unchanged.

The result is read as that of the simulation is (`tracer.trace`): the history of torch's allocator is played on a
`VirtualDevice`, with the owners, phases and modules that were noted while the steps ran. Operators have no names there,
and the workspaces of kernels count as temporaries.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools._torch import (
    clear_cublas_workspaces,
    cuda_memory_snapshot,
    record_cuda_history,
    stop_cuda_history,
)
from lightning_memtools.memory.allocator import Block
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.optimizer_lines import OptimizerLines
from lightning_memtools.memory.peak_holders import BlockOwner, block_owners
from lightning_memtools.memory.sizes import parse_size
from lightning_memtools.memory.step_snapshot import ModuleLabels
from lightning_memtools.memory.user_code import CodeLine, line_of_frames
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.module_scopes import BACKWARD, OPTIMIZER, OUTSIDE
from lightning_memtools.null_cuda.launch import CONVOLUTIONS, computes_nothing
from lightning_memtools.null_cuda.recorded_convolutions import convolutions_in, workspaces_after
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.simulation.known_values import FollowedValues, KnownValues, is_too_large, values_known
from lightning_memtools.simulation.one_rank import Placement, one_rank
from lightning_memtools.simulation.recording import WORKSPACE, AllocationRecorder
from lightning_memtools.simulation.step_runner import Recipe, StepListener, copy_of_batch
from lightning_memtools.simulation.tracer import (
    OUTSIDE_OF_STEPS,
    SimulationSettings,
    Subject,
    Traced,
    count_parameters,
    noted_shapes,
    notes_of,
    optimizer_maker,
    run_steps,
)
from lightning_memtools.state.random_state import random_streams_restored

_MOST_ENTRIES = 10_000_000
_FEW = 1024
_CATEGORIES = {
    "parameters": Category.PARAMETER,
    "buffers": Category.BUFFER,
    "gradients": Category.GRADIENT,
    "optimizer": Category.OPTIMIZER,
    "inputs": Category.INPUT,
}


class CudaRunError(RuntimeError):
    """The steps cannot run on PyTorch's CUDA code here; the message says why."""


def trace_on_cuda(subject: Subject, batch: Any, recipe: Recipe, settings: SimulationSettings) -> Traced:
    """Run the steps on a CUDA device that computes nothing; the user's objects stay as they are.

    What else this process holds on the device does not count.

    Args:
        subject: The model and its step.
        batch: The batch. Only its sizes matter: everything that is read back from the device is zero.
        recipe: The settings of the loop.
        settings: The allocator's settings have to be those of this process; the GPU is the device's.

    Raises:
        CudaRunError: This process has no such device.
        RuntimeError: Ranks are wanted, and this process is one of another process group already.
    """
    if not (torch.cuda.is_available() and computes_nothing(torch.device("cuda"))):
        ranks = subject.ranks
        what = 'engine="cuda"' if ranks is None or not ranks.shards else f'strategy="{ranks.strategy}"'
        option = "--engine cuda" if ranks is None else f"--strategy {ranks.strategy} --devices {ranks.devices}"
        raise CudaRunError(
            f"{what} needs a CUDA device that computes nothing: use `memtools estimate {option}`, or start this "
            "program with `python -m lightning_memtools.null_cuda`. Both need a CUDA build of PyTorch and a C "
            "compiler, and no GPU (docs/dry-run.md)."
        )
    _clean_up()
    is_empty = torch.cuda.memory_allocated() == 0
    model, dtype = subject.model, recipe.dtype
    # What is on meta is sharded there, and a rank never holds all of it.
    exchange = _ZeroExchange(dtype, keep_meta=subject.ranks is not None and subject.ranks.strategy == "fsdp2")
    torch.cuda.reset_peak_memory_stats()
    with (
        tempfile.TemporaryDirectory() as folder,
        values_known() as known,
        borrowed([model], exchange),
        random_streams_restored(),
        one_rank(model, subject.ranks, recipe) as place,
    ):
        if subject.ranks is not None and subject.ranks.shards:
            exchange.forget()
        exchange.forget_memory()
        whole = [one.numel() for one in model.parameters()]
        convolutions = Path(folder) / "convolutions.txt"
        before = os.environ.get(CONVOLUTIONS)
        os.environ[CONVOLUTIONS] = str(convolutions)
        run = _CudaRun(model, batch, dtype, place, known)
        result = Traced(run.device_for(settings), AllocationRecorder(run.device.allocator))
        record_cuda_history(_MOST_ENTRIES)
        try:
            with noted_shapes(model, result.shapes), torch.enable_grad(), FollowedValues(known), run.optimizer_lines:
                maker = optimizer_maker(subject, exchange)
                run_steps(subject, maker, recipe, run, device="cuda", set_up=run.set_up)
            run.note_owners()
            snapshot = cuda_memory_snapshot()
            count_parameters(run.called, result)
            result.notes = (*place.notes, *notes_of(known))
            if whole and subject.ranks is not None:
                # FSDP 1 leaves a parameter's place in the model to this rank's part of it.
                result.n_parameters = sum(whole)
        finally:
            stop_cuda_history()
            run.labels.remove()
            os.environ.pop(CONVOLUTIONS)
            if before is not None:
                os.environ[CONVOLUTIONS] = before
        run.play(snapshot, convolutions, result.recorder, settings)
    real = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    _clean_up()
    played = result.device.stats()
    if is_empty and real != (played.peak_allocated, played.peak_reserved):
        raise CudaRunError(f"The history of torch's allocator does not give its own peaks: {real} and {played}.")
    return result


class _ZeroExchange(TensorExchange):
    """Makes stand-ins of zeros, like everything that the device computes; large ones take no pages."""

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        made = super()._make(tensor)
        if made.numel() <= _FEW:
            made.data.zero_()
        return made


def _clean_up() -> None:
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()


class _CudaRun(StepListener):
    """Gives batches to the loop, labels requests with the phase, and notes which block has which owner."""

    def __init__(
        self, model: nn.Module, batch: Any, dtype: torch.dtype | None, place: Placement, known: KnownValues
    ) -> None:
        self._known = known
        self.called = self._model = model
        self._root = type(model).__name__
        self._place = place
        self._n_batches = 0
        self._batch = batch
        self._dtype = dtype
        self._optimizers: list[Optimizer] = []
        self._phase, self._step = "setup", -1
        # (phase, step, owners of blocks by address)
        self._notes: deque[tuple[str, int, dict[int, BlockOwner]]] = deque()
        self.optimizer_lines = OptimizerLines()
        self.labels = ModuleLabels(model)
        self.labels.enter_phase("setup")

    def device_for(self, settings: SimulationSettings) -> VirtualDevice:
        """Return the device that the history is played on."""
        self.device = VirtualDevice(allocator=settings.allocator, cuda_like=True, record=True)
        return self.device

    def begin(self, phase: str, step: int | None = None) -> None:
        """Note that a phase begins."""
        self._phase, self._step = phase, self._step if step is None else step
        self.labels.enter_phase(phase)
        self.note_owners()

    def set_up(self) -> nn.Module:
        """Put the model on the device, and return the module that a step calls."""
        self.called = self._place()
        return self.called

    def next_batch(self) -> Any:
        """Return a batch of the same sizes and known values, in host memory; large tensors take no pages."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            values = self._known.of(tensor)
            made: torch.Tensor = copy_of_batch(tensor, self._dtype)
            return made if values is None or is_too_large(tensor) else made.data.copy_(values)

        return map_tensors(self._batch, copied)

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return the batch, copied to the device."""
        batch = move(batch)
        self._note(dict.fromkeys((one.data_ptr() for one in tensors_in(batch)), BlockOwner("inputs")))
        self._n_batches += 1
        self._place.begin_batch(self.called, self._n_batches)
        return batch

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Keep the optimizers, whose state is noted."""
        self._optimizers = optimizers

    def note_owners(self) -> None:
        """Note the blocks of parameters, gradients and optimizer states."""
        owners = block_owners(self.called, self._optimizers, None, self.optimizer_lines)
        self._note({address: owner for address, owner in owners.items() if owner.category in _CATEGORIES})

    def _note(self, owned: dict[int, BlockOwner]) -> None:
        self._notes.append((self._phase, self._step, owned))

    def play(
        self, snapshot: dict[str, Any], convolutions: Path, recorder: AllocationRecorder, settings: SimulationSettings
    ) -> None:
        """Play the history on the device and record it."""
        entries = snapshot["device_traces"][0]
        workspaces = workspaces_after(entries, convolutions_in(convolutions, 0), settings.gpu)
        allocator = self.device.allocator
        live: dict[int, Block] = {}
        streams = {0: 0}  # those of the device by their numbers here
        of_products = {parse_size(settings.cublas_workspace), 2**20}  # of cuBLAS and of cuBLASLt
        for at, entry in enumerate(entries):
            address = entry["addr"]
            if entry["action"] == "alloc":
                phase, _, label = entry.get("user_metadata", "").partition(" | ")
                # Autograd's thread has no label before the first gradient of a module.
                while phase and phase != recorder.phase and self._notes:
                    self._pass(recorder, live)
                module = self._module_of(label, recorder.phase)
                stream = streams.setdefault(entry["stream"], len(streams))
                block = allocator.malloc(entry["size"], stream=stream, label=module)
                recorder.on_allocation(block, Category.ACTIVATION if recorder.step >= 0 else Category.OTHER, module)
                live[address] = block
                recorder.allocations[block.id].line = self._line_of(entry)
                for n_bytes in workspaces.get(at, ()):
                    recorder.on_library_workspace(n_bytes)
            elif entry["action"] == "free_completed" and address in live:
                block = live.pop(address)
                known = recorder.allocations[block.id]
                allocator.free(block)
                # From torch 2.15 on, a product's workspace is freed before anything else is asked for.
                is_next = known.born + 1 == len(recorder.allocated)
                is_workspace = is_next and known.kind == Category.ACTIVATION and block.requested in of_products
                of_block = (None, "") if is_workspace else (Category(known.kind), known.module)
                recorder.on_free(block.id, *of_block)
            elif entry["action"] == "segment_free":
                allocator.empty_cache()
        while self._notes:
            self._pass(recorder, live)
        for block in live.values():
            known = recorder.allocations[block.id]
            # What cuBLAS keeps has no owner, and stays.
            if known.kind == Category.ACTIVATION and block.requested == parse_size(settings.cublas_workspace):
                known.kind, known.module, known.line = WORKSPACE, "workspace", None

    @staticmethod
    def _line_of(entry: dict[str, Any]) -> CodeLine | None:
        return line_of_frames(entry.get("frames") or (), stop_at=OUTSIDE_OF_STEPS)

    def _pass(self, recorder: AllocationRecorder, live: dict[int, Block]) -> None:
        phase, step, owned = self._notes.popleft()
        if (phase, step) != (recorder.phase, recorder.step):
            recorder.begin(phase, step)
        for address, owner in owned.items():
            if address in live:
                known = recorder.allocations[live[address].id]
                known.kind, known.module = _CATEGORIES[owner.category], self._path(owner.module)
                known.line = owner.line or known.line

    def _module_of(self, name: str, phase: str) -> str:
        if phase in {"backward", "clip", "optimizer"}:
            return BACKWARD if phase == "backward" else OPTIMIZER
        return self._path(name or None)

    def _path(self, name: str | None) -> str:
        """Return a module's name as the simulation gives it, which begins with the model's class."""
        root = self._root
        return OUTSIDE if name is None else root if name in {"", root} else f"{root}.{name}"
