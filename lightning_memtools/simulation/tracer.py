"""Runs the user's step on fake tensors and on a virtual device, and leaves the user's objects unchanged.

`trace` records every allocation of some steps, for an estimate. `tracing` measures the peak and the operations of one
step as often as it is asked to, for a checkpoint plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_memtools._torch import DEVICE_OF, FakeTensor, OperatorMode, uncompiled
from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import storage_of
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation import step_runner
from lightning_memtools.simulation.fakes import TensorExchange
from lightning_memtools.simulation.known_values import KnownValues
from lightning_memtools.simulation.recording import AllocationRecorder
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step_runner import (
    MakeOptimizer,
    PlainModule,
    Recipe,
    StepFunction,
    StepListener,
    StepRunner,
    copy_of_batch,
    is_lightning_module,
)


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
        batch_idx: The index of the batch in its epoch, for a single step of a run.
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
    batch_idx: int = 0


@dataclass(frozen=True, slots=True)
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
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    n_parameters: int
    n_gradients: int
    parameter_bytes: int
    notes: tuple[str, ...]


class _FakeSteps(StepListener):
    """Provides fake copies of a batch to a training loop. On the virtual device, they take memory as on a GPU.

    Attributes:
        device: The virtual device.
        model: The model, which holds fake tensors while steps may run.
        runner: Runs the steps.
    """

    runner: StepRunner

    def __init__(self, request: StepRequest, device: VirtualDevice) -> None:
        self.device, self.model = device, request.model
        self._batch = request.batch

    def next_batch(self) -> Any:
        """Return a copy of the batch: fake CPU tensors of the same shapes. Known values are still tracked."""
        with self.device.host():
            return copy_of_batch(self._batch)

    def place(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Move the batch to the virtual device with `move`, count the memory that it takes there, and return it."""
        if next(tensors_in(batch), None) is not None:
            self.device.count_batch(batch)
        return move(batch)

    def on_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Put the existing state of the optimizers on the virtual device."""
        for optimizer in optimizers:
            if optimizer.state:
                self.device.track(optimizer)

    def forget(self) -> None:
        """Release the batch and the model at once. Reference cycles of hooks and the Trainer would keep them longer."""
        if isinstance(self.runner.module, PlainModule):
            self.runner.module.forget()
        self.model = self._batch = self.runner = None  # type: ignore[assignment]


class _Recording(_FakeSteps):
    """Records when each phase of a step begins."""

    recorder: AllocationRecorder

    def begin(self, phase: str, step: int | None = None) -> None:
        """Record that a phase begins."""
        self.recorder.begin(phase, step)


@contextmanager
def _on_fake_tensors(request: StepRequest, steps: _FakeSteps, *, hooks: bool = True) -> Iterator[KnownValues]:
    """Context manager: give a model fake tensors on the device of `steps`, and set `steps.runner`, which runs its step.

    For `hooks`, see StepRunner.
    """
    exchange = TensorExchange(request.recipe.dtype)
    make = partial(_optimizers, request.optimizer, exchange) if request.optimizer else None
    with simulated(request.model, steps.device, exchange, cuda=request.cuda) as known:
        steps.runner = StepRunner(
            request.model,
            request.recipe,
            steps,
            step=request.step,
            make_optimizer=make,
            trainer=request.trainer,
            hooks=hooks,
        )
        try:
            yield known
        except Exception as error:
            for what in known.assumed:  # it may be the reason, as where a step asserts what nobody computed
                error.add_note(f"Assumed at {what}.")
            raise
        finally:
            steps.forget()


def trace(request: StepRequest) -> Traced:
    """Run steps on fake tensors and record their allocations. Nothing is computed, and no user object is changed."""
    request = replace(request, model=uncompiled(request.model))
    model, stage, gpu = request.model, request.recipe.stage, GpuShape.of(find_gpu(request.capacity))
    workspace = cublas_workspace_bytes(compute_capability=gpu.compute_capability) if request.cuda else 0
    device = VirtualDevice(
        allocator=request.allocator, cublas_workspace=f"{workspace}B", cuda_like=request.cuda, record=True
    )
    device.gpu = gpu
    # The runner's frames divide a step from the user's call of the estimate, which asks for no memory itself.
    recorder = AllocationRecorder(device.allocator, stop_at=step_runner.__file__)
    device.listen(recorder)
    steps = _Recording(request, device)
    steps.recorder = recorder
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    with recorder.lines, _on_fake_tensors(request, steps) as known:
        if not is_lightning_module(model) and model.training != (stage == "train"):
            model.train(stage == "train")
        with _note_shapes(model, shapes):
            steps.runner.run()
        recorder.finish(device)
        # A shared parameter is there once, and the weights of a recurrent layer share their storage.
        parameters = list(model.parameters())
        storages = filter(None, map(storage_of, (*parameters, *model.buffers())))
        return Traced(
            device,
            recorder,
            shapes,
            n_parameters=sum(parameter.numel() for parameter in parameters),
            n_gradients=sum(parameter.numel() for parameter in parameters if parameter.grad is not None),
            parameter_bytes=sum({one: storage.nbytes() for one, storage in storages}.values()),
            notes=tuple(f"Assumed at {what}." for what in known.assumed),
        )


def _optimizers(given: Any, exchange: TensorExchange, parameters: list[nn.Parameter]) -> Any:
    """Return optimizers for the fake `parameters`: copies of those in `given`, or made by calling `given`.

    Raises:
        TypeError: The function returns something other than an optimizer.
    """
    if isinstance(given, Sequence):
        return list(map(exchange, given))
    made = exchange(given) if isinstance(given, Optimizer) else given(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(f"optimizer returned {made!r}: it has to return a torch.optim.Optimizer.")
    return made


def _note_shapes(model: nn.Module, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> RemovableHandle:
    """Until the handle is removed, write the output shapes of each module's first forward into `shapes`, by name."""
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, _args: Any, out: Any) -> None:
        name = names.get(id(module))
        if name is not None and name not in shapes:
            shapes[name] = tuple(tuple(tensor.shape) for tensor in tensors_in(out))

    return register_module_forward_hook(note)


class NoLossError(Exception):
    """Raised if a step returned no loss. Lightning skips such a step."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The memory that a traced step takes, and the number of its floating-point operations.

    Attributes:
        peak_bytes: The peak of allocated memory.
        static_bytes: The memory that was allocated before the step: parameters, gradients, optimizer state, the batch,
            and the workspaces of libraries.
        gradient_bytes: The bytes of dense gradients, a part of `static_bytes`. Every step frees and reallocates them.
        operations: The number of operations: `flops`, plus one for each element that other operators returned.
        flops: The floating-point operations of matrix products and convolutions, counted as torch's FlopCounterMode
            does.
    """

    peak_bytes: int
    static_bytes: int
    gradient_bytes: int
    operations: int
    flops: int

    @property
    def activation_bytes(self) -> int:
        """The bytes at the peak that the step itself allocated: the peak less the static bytes."""
        return self.peak_bytes - self.static_bytes

    @property
    def resident_bytes(self) -> int:
        """The bytes that are allocated throughout the step: the static bytes less the gradients."""
        return self.static_bytes - self.gradient_bytes


class OperationCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of the operators that run in its context.

    Attributes:
        pauses: While True, operations are not counted.
        total: The number of operations so far: `flops`, plus one for each element that other operators returned.
        flops: The number of floating-point operations of matrix products and convolutions alone.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pauses = False
        self.total = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, count its operations, and return its result."""
        del types
        kwargs = kwargs or {}
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):  # more than half of all calls, and slow further down
            return args[0].fake_device
        out = func(*args, **kwargs)
        if self.pauses:
            return out
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        operations = 0
        if formula is not None:
            operations = int(formula(*args, **kwargs, out_val=out))
            self.flops += operations
        elif not getattr(func, "is_view", False):
            operations = sum(
                one.numel() for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, Tensor)
            )
        self.total += operations
        return out


class StepTrace(_FakeSteps):
    """Runs a step in Lightning's own loop, with fake tensors on a virtual device (a simulated GPU).

    Attributes:
        counted: Counts the operations of the run.
    """

    def __init__(self, step: StepRequest, device: VirtualDevice) -> None:
        super().__init__(step, device)
        self.counted = OperationCount()
        self._may_lack_loss = step.step is not None
        self._accumulate, self._batch_idx = step.recipe.accumulate, step.batch_idx
        self._peak = self._static = self._gradients = 0
        self._before_backward: Callable[[], None] = lambda: None

    def allocated(self) -> int:
        """Return the bytes that are allocated now."""
        return self.device.stats().allocated or 0

    def peak_since(self) -> int:
        """Return the peak of allocated bytes since the last call of this function."""
        peak = self.device.stats().peak_allocated or 0
        self._peak = max(self._peak, peak)
        self.device.reset_peaks()
        return peak

    def run(
        self, around_forward: Callable[[], Any] = nullcontext, before_backward: Callable[[], None] = lambda: None
    ) -> StepCost:
        """Run the step as Lightning does: forward, zero_grad, backward, optimizer.

        The first call also allocates gradients, optimizer state and library workspaces, so measure a later call.
        `around_forward` returns a context manager for the forward pass. `before_backward` is called after that pass.

        Raises:
            NoLossError: The step of a LightningModule returned no loss.
            Exception: Whatever the step raises.
        """
        runner = self.runner
        n_losses = runner.n_losses

        @contextmanager
        def around_step() -> Iterator[None]:
            self._begin_measuring()
            with around_forward():
                yield

        runner.around_step = around_step
        self._before_backward = before_backward
        runner.run_batch(self._index())
        has_loss = runner.n_losses > n_losses
        if not has_loss:  # it is optimized manually, or has no backward pass
            before_backward()
        if runner.is_automatic and not has_loss and not self._may_lack_loss:
            raise NoLossError("training_step gave no loss")
        self.peak_since()
        return StepCost(self._peak, self._static, self._gradients, self.counted.total, self.counted.flops)

    def _index(self) -> int:
        """Return the index to run the batch at: its own, or a later index at which the optimizer steps."""
        per_step = self._accumulate if self.runner.is_automatic else 1
        return self._batch_idx // per_step * per_step + per_step - 1

    def _begin_measuring(self) -> None:
        self._peak = self.counted.total = self.counted.flops = 0
        self.counted.pauses = False
        self.device.reset_peaks()
        self._static = self.allocated()
        found = (one.grad for one in self.model.parameters())
        self._gradients = sum(one.nbytes for one in found if one is not None and one.layout is torch.strided)

    def begin(self, phase: str, step: int | None = None) -> None:
        """Begin a phase. Operations are counted only in the phases "forward" and "backward"."""
        del step
        self.counted.pauses = phase not in {"forward", "backward"}
        if phase == "backward" and self.runner.is_automatic:
            self._before_backward()


@contextmanager
def tracing(step: StepRequest) -> Iterator[StepTrace]:
    """Context manager: give a model fake tensors on a new virtual device, and yield a StepTrace that runs its step.

    The device is like the present one, whatever `step.capacity` says. If `step.step` is given, it may return any
    tensors, of which the sum is the loss, and no hooks of a LightningModule run. Within the context, a gradient
    checkpointing plan has no effect, and a model sharded by FSDP 2 is unsharded.
    """
    if step.step is not None:
        step = replace(step, step=partial(_scalar_of, step.step))
    active = VirtualDevice.current()
    is_cuda_like = step.cuda or (active is not None and active.cuda_like)
    workspace = _workspace_of_cuda() if step.cuda else active.cublas_workspace if active and is_cuda_like else 0
    steps = StepTrace(step, VirtualDevice(cuda_like=is_cuda_like, cublas_workspace=f"{workspace}B"))
    with _on_fake_tensors(step, steps, hooks=step.step is None), steps.counted:
        for held in map(vars, step.model.modules()):
            if held.pop("__getstate__", None) is not None:  # of a plan that is applied
                held.pop("forward", None)
        yield steps


def _workspace_of_cuda() -> int:
    """Return the size in bytes of cuBLAS's workspace on this machine's GPU, or on an A100 if there is no GPU."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return cublas_workspace_bytes(compute_capability=capability, config=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


def _scalar_of(forward: StepFunction, model: nn.Module, batch: Any) -> Tensor | None:
    """Return the scalar to call backward on: the loss, or the sum of all outputs; None without gradients."""
    tensors = [one for one in tensors_in(forward(model, batch)) if one.requires_grad]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    sums = [one.real.sum() if one.is_complex() else one.sum() for one in tensors]
    return torch.stack([one.float() for one in sums]).sum() if len(sums) > 1 else (sums[0] if sums else None)
