"""Traces a training step on fake tensors and measures its peak memory and its operations, once per plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_memtools._torch import DEVICE_OF, FakeTensor, OperatorMode
from lightning_memtools.memory.allocator import cublas_workspace_bytes
from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange, copy_optimizer
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step_runner import PlainModule, Recipe, StepRunner
from lightning_memtools.simulation.tracer import FakeBatches

Forward = Callable[[nn.Module, Any], Any]
"""Runs the forward pass of a fake model on a fake batch, and returns the tensors that backward starts from."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One training step that can be traced.

    Attributes:
        model: The model, which is not changed.
        batch: The input of the step: tensors, also in nested containers. The batch is not changed.
        forward: Runs the forward pass; None to run the training_step of a LightningModule.
        optimizers: The optimizers, whose state takes memory as well.
        cuda: True to allocate as CUDA's kernels do; False to allocate as the CPU's kernels do.
        trainer: The Trainer of a LightningModule. If it accumulates gradients over several batches, the step is
            traced with the last batch of these.
        batch_idx: The index of the batch in its epoch.
    """

    model: nn.Module
    batch: Any
    forward: Forward | None
    optimizers: tuple[Optimizer, ...] = ()
    cuda: bool = False
    trainer: Any = None
    batch_idx: int = 0


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


class StepTrace(FakeBatches):
    """Runs a step in Lightning's own loop, with fake tensors on a virtual device (a simulated GPU).

    Attributes:
        model: The model, which holds fake tensors.
        device: The virtual device.
        counted: Counts the operations of the run.
    """

    def __init__(
        self, step: TracedStep, device: VirtualDevice, exchange: TensorExchange, counted: OperationCount
    ) -> None:
        super().__init__(device, step.batch)
        self.model = step.model
        self.counted = counted
        self._step = step
        self._peak = self._static = self._gradients = 0
        self._before_backward: Callable[[], None] = lambda: None
        optimizers = [copy_optimizer(one, exchange.known, with_state=False) for one in step.optimizers]
        make = (lambda _parameters: optimizers) if optimizers else None
        self._accumulate = 1
        self._runner: Any
        if step.forward is not None:
            self._runner = StepRunner(PlainModule(step.model, partial(_scalar_of, step.forward), make), Recipe(), self)
            return
        self._accumulate = step.trainer.accumulate_grad_batches
        clip = step.trainer.gradient_clip_val or None  # Lightning takes 0 for no clipping
        recipe = Recipe(precision=None, accumulate=self._accumulate, clip=clip)
        self._runner = StepRunner(step.model, recipe, self, trainer=step.trainer, make_optimizer=make)

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
        runner = self._runner
        n_losses = runner.n_losses

        @contextmanager
        def around_step() -> Iterator[None]:
            self._begin_measuring()
            with around_forward():
                yield

        runner.around_step = around_step
        self._before_backward = before_backward if runner.is_automatic else lambda: None
        runner.run_batch(self._index())
        self._before_backward = lambda: None
        has_loss = runner.n_losses > n_losses
        if not has_loss:  # it is optimized manually, or has no backward pass
            before_backward()
        if runner.is_automatic and not has_loss and self._step.forward is None:
            raise NoLossError("training_step gave no loss")
        self.peak_since()
        return StepCost(self._peak, self._static, self._gradients, self.counted.total, self.counted.flops)

    def _index(self) -> int:
        """Return the index to run the batch at: its own, or a later index at which the optimizer steps."""
        per_step = self._accumulate if self._runner.is_automatic else 1
        return self._step.batch_idx // per_step * per_step + per_step - 1

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
        if phase == "backward":
            self._before_backward()

    def forget(self) -> None:
        """Release the batch and the model at once. Reference cycles of hooks and the Trainer would keep them longer."""
        if isinstance(self._runner.module, PlainModule):
            self._runner.module.forget()
        self.model = self._batch = self._step = None  # type: ignore[assignment]
        self._runner = self._before_backward = None  # type: ignore[assignment]


@contextmanager
def tracing(step: TracedStep) -> Iterator[StepTrace]:
    """Context manager: give a model fake tensors on a new virtual device, and yield a StepTrace that runs its step.

    Within the context, a gradient checkpointing plan has no effect, and a model sharded by FSDP 2 is unsharded.
    """
    active = VirtualDevice.current()
    is_cuda_like = step.cuda or (active is not None and active.cuda_like)
    workspace = _workspace_of_cuda() if step.cuda else active.cublas_workspace if active and is_cuda_like else 0
    device = VirtualDevice(cuda_like=is_cuda_like, cublas_workspace=f"{workspace}B")
    exchange = TensorExchange()
    with (
        simulated(step.model, device, exchange, cuda=step.cuda),
        OperationCount() as counted,
    ):
        for module in step.model.modules():
            _undo_instance_changes(module)
        trace = StepTrace(step, device, exchange, counted)
        try:
            yield trace
        finally:
            trace.forget()


def _undo_instance_changes(module: nn.Module) -> None:
    """Delete the attributes that gradient checkpointing has set on a module, such as a replacement of `forward`."""
    state_of_copies = vars(module).get("__getstate__")
    if state_of_copies is not None:
        kept = state_of_copies()
        for name in set(vars(module)) - set(kept):
            del vars(module)[name]


def _workspace_of_cuda() -> int:
    """Return the size in bytes of cuBLAS's workspace on this machine's GPU, or on an A100 if there is no GPU."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return cublas_workspace_bytes(compute_capability=capability, config=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


def _scalar_of(forward: Forward, model: nn.Module, batch: Any) -> Tensor | None:
    """Return the scalar to call backward on: the loss, or the sum of all outputs; None without gradients."""
    tensors = [one for one in tensors_in(forward(model, batch)) if one.requires_grad]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    sums = [one.real.sum() if one.is_complex() else one.sum() for one in tensors]
    return torch.stack([one.float() for one in sums]).sum() if len(sums) > 1 else (sums[0] if sums else None)
