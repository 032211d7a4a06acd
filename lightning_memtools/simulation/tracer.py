"""Runs the user's step on fake tensors and on a virtual device, and leaves the user's objects unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from lightning_memtools._torch import uncompiled
from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import storage_of
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation import step_runner
from lightning_memtools.simulation.fakes import TensorExchange, copy_optimizer
from lightning_memtools.simulation.known_values import values_known
from lightning_memtools.simulation.recording import AllocationRecorder
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step_runner import (
    MakeOptimizer,
    Recipe,
    StepFunction,
    StepListener,
    StepRunner,
    copy_of_batch,
    is_lightning_module,
)

OUTSIDE_OF_STEPS = step_runner.__file__
"""The file whose frames divide a step from the user's call of the estimate, which asks for no memory itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A step to be run on fake tensors, and the GPU to simulate.

    Attributes:
        model: Any module.
        batch: The batch. Its values do not matter, except those of small tensors that the user's code reads.
        recipe: The settings of the loop that runs the step.
        step: Computes the loss of a batch; None to run a LightningModule's own step.
        optimizer: An optimizer, a list of optimizers, a function or class that makes one from parameters, or None.
        trainer: The Trainer of the run that the step is taken from; None if there is none.
        cuda: True to allocate what CUDA kernels allocate; False for CPU kernels.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        capacity: The GPU's memory size, or its name. Without a name, the kernels of an A100 are simulated.
    """

    model: nn.Module
    batch: Any
    recipe: Recipe = field(default_factory=Recipe)
    step: StepFunction | None = None
    optimizer: Optimizer | Sequence[Optimizer] | type[Optimizer] | MakeOptimizer | None = None
    trainer: Any = None
    cuda: bool = True
    allocator: str = ""
    capacity: str | None = None


@dataclass(slots=True)
class Traced:
    """The result of `trace`: what the steps allocated, and the sizes of the model.

    Attributes:
        device: The virtual device, which no longer tracks allocations.
        recorder: The record of all allocations on the device.
        shapes: The output shapes of each module in its first forward, by module name.
        n_parameters: The number of elements of the parameters; shared parameters count once.
        n_gradients: The number of elements of the parameters that got a gradient.
        parameter_bytes: The size in bytes of parameters and buffers.
        notes: The assumptions that were made where a step read unknown values.
    """

    device: VirtualDevice
    recorder: AllocationRecorder
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    n_parameters: int = 0
    n_gradients: int = 0
    parameter_bytes: int = 0
    notes: tuple[str, ...] = ()


class FakeBatches(StepListener):
    """Provides fake copies of a batch to a training loop. On the virtual device, they take memory as on a GPU."""

    def __init__(self, device: VirtualDevice, batch: Any, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self._batch = batch
        self._dtype = dtype

    def next_batch(self) -> Any:
        """Return a copy of the batch: fake CPU tensors of the same shapes. Known values are still tracked."""
        with self.device.host():
            return copy_of_batch(self._batch, self._dtype)

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Move the batch to the virtual device with `move`, count the memory that it takes there, and return it."""
        if next(tensors_in(batch), None) is not None:
            self.device.count_batch(batch)
        return move(batch)


class _Recording(FakeBatches):
    """Records when each phase of a step begins, and puts the existing state of optimizers on the virtual device."""

    recorder: AllocationRecorder
    optimizers: Sequence[Optimizer] = ()  # kept until the trace ends: the device refers to them weakly

    def begin(self, phase: str, step: int | None = None) -> None:
        """Record that a phase begins."""
        self.recorder.begin(phase, step)

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Put the existing state of the optimizers on the virtual device."""
        self.optimizers = optimizers
        for optimizer in optimizers:
            if optimizer.state:
                self.device.track(optimizer)


def trace(request: StepRequest) -> Traced:
    """Run steps on fake tensors and record their allocations. Nothing is computed, and no user object is changed."""
    recipe, gpu = request.recipe, GpuShape.of(find_gpu(request.capacity))
    workspace = cublas_workspace_bytes(compute_capability=gpu.compute_capability) if request.cuda else 0
    device = VirtualDevice(
        allocator=request.allocator, cublas_workspace=f"{workspace}B", cuda_like=request.cuda, record=True
    )
    device.gpu = gpu
    recorder = AllocationRecorder(device.allocator, stop_at=OUTSIDE_OF_STEPS)
    device.listen(recorder)
    listener = _Recording(device, request.batch, recipe.dtype)
    listener.recorder = recorder
    result = Traced(device, recorder)
    model = uncompiled(request.model)
    exchange = TensorExchange(recipe.dtype)
    make = None if request.optimizer is None else partial(_optimizers, request.optimizer, exchange)
    with values_known() as known, simulated(model, device, exchange, cuda=request.cuda), recorder.lines:
        if not is_lightning_module(model) and model.training != (recipe.stage == "train"):
            model.train(recipe.stage == "train")
        with noted_shapes(model, result.shapes):
            runner = StepRunner(
                model, recipe, listener, step=request.step, make_optimizer=make, trainer=request.trainer
            )
            runner.run()
        _count_parameters(model, result)
        recorder.finish(device)
        result.notes = tuple(f"Assumed at {what}." for what in known.assumed)
    return result


def _count_parameters(model: nn.Module, result: Traced) -> None:
    """Count the model's parameters and their bytes, and store both in `result`."""
    # `parameters()` yields a shared parameter once.
    parameters = list(model.parameters())
    result.n_parameters = sum(parameter.numel() for parameter in parameters)
    result.n_gradients = sum(parameter.numel() for parameter in parameters if parameter.grad is not None)
    storages = filter(None, map(storage_of, (*parameters, *model.buffers())))
    # The weights of a recurrent layer share theirs.
    result.parameter_bytes = sum({one: storage.nbytes() for one, storage in storages}.values())


def _optimizers(given: Any, exchange: TensorExchange, parameters: list[nn.Parameter]) -> Any:
    """Return optimizers for the fake `parameters`: copies of those in `given`, or made by calling `given`.

    Raises:
        TypeError: The function returns something other than an optimizer.
    """
    if isinstance(given, Sequence):
        return [copy_optimizer(one, exchange, with_state=True) for one in given]
    made = copy_optimizer(given, exchange, with_state=True) if isinstance(given, Optimizer) else given(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer returned {made!r}: it has to return a torch.optim.Optimizer.")
    return made


@contextmanager
def noted_shapes(model: nn.Module, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> Iterator[None]:
    """Context manager: write the output shapes of each module in its first forward into `shapes`, by module name."""
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, _args: Any, out: Any) -> None:
        name = names.get(id(module))
        if name is not None and name not in shapes:
            shapes[name] = tuple(tuple(tensor.shape) for tensor in tensors_in(out))

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()
