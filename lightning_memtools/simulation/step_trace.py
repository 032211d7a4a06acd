"""Traces a training step on fake tensors and measures its peak memory and its operations, once per plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_memtools._torch import (
    DEVICE_OF,
    LOCAL_SCALAR,
    FakeTensor,
    OperatorMode,
    operator_packet,
    without_sharding_hooks,
)
from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.memory.virtual.operators import is_gradient_sum
from lightning_memtools.simulation.fakes import TensorExchange, attributes_restored, copy_optimizer
from lightning_memtools.simulation.simulated import simulated

Device = Literal["cpu", "cuda-like", "cuda"]
Forward = Callable[[nn.Module, Any], Any]
"""Runs the forward pass of a fake model on a fake batch, and returns the tensors that backward starts from."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One training step that can be traced.

    Attributes:
        model: The model, which is not changed.
        batch: The input of the forward pass, tensors in any nesting; it is not changed either.
        forward: Runs the forward pass.
        optimizers: The optimizers, whose state takes memory as well.
        device: The device whose operators are traced: "cpu"; "cuda"; or "cuda-like", a CPU with what CUDA's kernels,
            dropout and optimizers take, as in a `VirtualDevice(cuda_like=True)`.
        accumulates: Gradients of several batches are added up before the optimizer steps: the traced step is the last
            of these.
        held_bytes: The memory that other things take on the device all the time, such as averages of the weights.
        first_calls_only: Each traced run of the step finds the attributes of the model as the first one found them.
    """

    model: nn.Module
    batch: Any
    forward: Forward
    optimizers: tuple[Optimizer, ...] = ()
    device: Device = "cpu"
    accumulates: bool = False
    held_bytes: int = 0
    first_calls_only: bool = False


class NoLossError(Exception):
    """A step gave no loss. Training skips it."""


class StepDiffersError(Exception):
    """A step raised or gave no loss when it was traced again, and did not when it was traced first."""

    def __str__(self) -> str:
        return f"the step {self.args[0]} when it was traced a second time"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The memory and the operations of a traced step.

    Attributes:
        peak_bytes: The peak of allocated memory.
        static_bytes: The memory that was allocated before the step: parameters, gradients, optimizer state, the batch,
            and the workspaces of libraries.
        gradient_bytes: The part of it that gradients take, which every step makes anew; without sparse ones.
        operations: The floating-point operations of matrix products and convolutions, plus one for each element that
            any other operator returned.
        flops: Those of matrix products and convolutions alone, as torch's FlopCounterMode counts them.
    """

    peak_bytes: int
    static_bytes: int
    gradient_bytes: int
    operations: int
    flops: int

    @property
    def activation_bytes(self) -> int:
        """The part of the peak that the step itself allocated."""
        return self.peak_bytes - self.static_bytes

    @property
    def resident_bytes(self) -> int:
        """The memory that is allocated all the time."""
        return self.static_bytes - self.gradient_bytes


class OperationCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts operations. `.item()` of a fake tensor returns 1, so that code which logs values runs.

    Attributes:
        total: The operations so far.
        flops: Those of matrix products and convolutions alone.
        listener: Is told of every operator: the operator, its arguments, its result and its operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.flops = 0
        self.listener: Callable[[Any, tuple[Any, ...], dict[str, Any], Any, int], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count."""
        del types
        kwargs = kwargs or {}
        if func is LOCAL_SCALAR:
            return _number_like(args[0])
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):  # more than half of all calls, and slow further down
            return args[0].fake_device
        if is_gradient_sum(func, args, kwargs):
            # Said here, because this mode refers to the sum's arguments: the device's, further down, could not tell.
            func = torch.ops.aten.add_.Tensor
        out = func(*args, **kwargs)
        formula = flop_registry.get(operator_packet(func))
        operations = 0
        if formula is not None:
            operations = int(formula(*args, **kwargs, out_val=out))
            self.flops += operations
        elif not getattr(func, "is_view", False):
            operations = sum(
                one.numel() for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, Tensor)
            )
        self.total += operations
        if self.listener is not None:
            self.listener(func, args, kwargs, out, operations)
        return out


class StepTrace:
    """A step whose model holds fake tensors on a virtual device, ready to run.

    Attributes:
        model: The model.
        device: The device.
        counted: Counts the operations of the run.
    """

    def __init__(self, step: TracedStep, device: VirtualDevice, counted: OperationCount) -> None:
        self.model = step.model
        self.device = device
        self.counted = counted
        self._forward = step.forward
        self._accumulates = step.accumulates
        self._first_calls_only = step.first_calls_only
        self._gave_loss: bool | None = None  # the first run, once it is over
        self._peak = 0
        self._original: Any = None
        self._batch: Any = None
        self._held: Tensor | None = None
        self._loss: Tensor | None = None
        self._optimizers: list[Any] = []

    def allocated(self) -> int:
        """Return the bytes that are allocated now."""
        return self.device.stats().allocated or 0

    def peak_since(self) -> int:
        """Return the highest allocation since the last call of this function, in bytes."""
        peak = self.peak_so_far()
        self._peak = max(self._peak, peak)
        self.device.reset_peaks()
        return peak

    @contextmanager
    def aside(self) -> Iterator[list[int]]:
        """Leave the code within out of the step's figures; afterwards the list holds its own peak in bytes."""
        self.peak_since()
        peak, before, counted = self._peak, self.allocated(), (self.counted.total, self.counted.flops)
        found: list[int] = []
        yield found
        found.append(self.peak_since() - before)
        self._peak = peak
        self.counted.total, self.counted.flops = counted

    def peak_so_far(self) -> int:
        """Return the highest allocation since the last call of `peak_since`, without resetting the peak."""
        return self.device.stats().peak_allocated or 0

    def prepare(self, step: TracedStep, exchange: TensorExchange) -> None:
        """Make the optimizers and what else is on the device, and keep the batch to take copies of it."""
        self._held = torch.empty(step.held_bytes, dtype=torch.uint8)
        self._original = step.batch
        self._optimizers = [copy_optimizer(one, exchange.known, with_state=False) for one in step.optimizers]

    def run(
        self, around_forward: Callable[[], Any] = nullcontext, before_backward: Callable[[], None] = lambda: None
    ) -> StepCost:
        """Run the step as Lightning does: forward, zero_grad, backward, optimizer.

        The first step makes the gradients, the optimizers' state and the workspaces of libraries. It leaves the
        allocator's blocks as later steps find them, on which the peak depends: what is measured is a later step.

        Raises:
            StepDiffersError: The step raised, or gave no loss, and did not when it ran first.
            Exception: Whatever the step raises when it runs first.
        """
        with attributes_restored(self.model) if self._first_calls_only else nullcontext():
            return self._run(around_forward, before_backward)

    def _run(self, around_forward: Callable[[], Any], before_backward: Callable[[], None]) -> StepCost:
        self.renew_batch()
        self._peak = 0
        self.device.reset_peaks()
        static = self.allocated()
        found = (one.grad for one in self.model.parameters())
        gradients = sum(one.nbytes for one in found if one is not None and one.layout is torch.strided)
        self.counted.total = self.counted.flops = 0
        with around_forward():
            loss = self._loss_now()
        # Training loops hold the loss of one step until the next one is computed.
        self._loss = None
        if loss is not None and not self._accumulates:
            self.model.zero_grad(set_to_none=True)
        before_backward()
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        operations, flops = self.counted.total, self.counted.flops
        self._loss = None if loss is None else loss.detach()
        ran_backward = loss is not None
        del loss
        for one in self._optimizers:
            with nullcontext() if ran_backward else _with_gradients(one):
                one.step()
        self.peak_since()
        return StepCost(self._peak, static, gradients, operations, flops)

    def _loss_now(self) -> Tensor | None:
        """Run the forward pass, and return its loss."""
        try:
            loss = _scalar(self._forward(self.model, self._batch))
        except Exception as error:
            if self._gave_loss is None:
                raise
            what = "gave no loss" if isinstance(error, NoLossError) else f"raised {type(error).__name__}"
            raise StepDiffersError(what) from error
        if loss is None and self._gave_loss:
            raise StepDiffersError("gave no loss")
        self._gave_loss = loss is not None
        return loss

    def renew_batch(self) -> None:
        """Put a new copy of the batch on the device in place of the last one, which a step may have changed."""
        self._batch = None
        with self.device.host():
            self._batch = map_tensors(self._original, TensorExchange())
        if next(tensors_in(self._batch), None) is not None:
            self.device.count_batch(self._batch)

    def run_forward(self) -> None:
        """Run the forward pass alone, as often as wanted."""
        self._forward(self.model, self._batch)

    def forget(self) -> None:
        """Free the batch now: hooks form reference cycles with the trace, which are collected only later."""
        self._batch = self._original = None
        self._forward = lambda _model, _batch: None


@contextmanager
def tracing(step: TracedStep) -> Iterator[StepTrace]:
    """Make a step's model hold fake tensors on a device of their own, and yield its trace.

    A checkpointing plan that is applied to the model is removed within, and a model that FSDP 2 shards is whole.
    """
    device = VirtualDevice(cuda_like=step.device != "cpu", cublas_workspace=f"{_cublas_workspace(step.device)}B")
    exchange = TensorExchange()
    with (
        without_sharding_hooks(step.model),
        simulated(step.model, device, exchange, cuda=step.device == "cuda"),
        OperationCount() as counted,
    ):
        for module in step.model.modules():
            _undo_instance_changes(module)
        trace = StepTrace(step, device, counted)
        trace.prepare(step, exchange)
        try:
            yield trace
        finally:
            trace.forget()


@contextmanager
def _with_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Within, all parameters have gradients, as they had where manual optimization took this step."""
    made = []
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one.requires_grad and one.grad is None:
                one.grad = torch.empty_like(one)
                made.append(one)
    yield
    for one in made:
        one.grad = None


def _undo_instance_changes(module: nn.Module) -> None:
    """Remove what a module leaves out of its copies, such as a plan's forward; `borrowed` restores it."""
    state_of_copies = vars(module).get("__getstate__")
    if state_of_copies is not None:
        kept = state_of_copies()
        for name in set(vars(module)) - set(kept):
            del vars(module)[name]


def device_of(*, cuda: bool) -> Device:
    """Return the device whose operators are traced: the one that the step will run on."""
    if cuda:
        return "cuda"
    virtual = VirtualDevice.current()
    return "cuda-like" if virtual is not None and virtual.cuda_like else "cpu"


def _cublas_workspace(device: Device) -> int:
    """Return the size of the workspace that cuBLAS takes where the step will run, in bytes."""
    virtual = VirtualDevice.current()
    if device != "cuda":
        return virtual.cublas_workspace if virtual is not None and device == "cuda-like" else 0
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    try:
        return cublas_workspace_bytes(
            compute_capability=capability, config=os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        )
    except ValueError:  # torch takes its default then
        return cublas_workspace_bytes(compute_capability=capability)


def _scalar(value: Any) -> Tensor | None:
    """Return the scalar that backward starts from: the loss, or the sum of all that a model returned; None if empty."""
    tensors = [one for one in tensors_in(value) if one.requires_grad]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    sums = [one.real.sum() if one.is_complex() else one.sum() for one in tensors]
    return torch.stack([one.float() for one in sums]).sum() if len(sums) > 1 else (sums[0] if sums else None)


def _number_like(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
