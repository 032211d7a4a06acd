"""Runs a training step over fake tensors in a simulated allocator, and counts what it does."""

# ruff: noqa: SLF001 - modules, autograd and storages are looked at through torch's own underscored parts, as torch's tools do
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_memtools.checkpointing.fakes import fake_mode, fake_model, fake_values
from lightning_memtools.memory.allocator import AllocatorConfig, CachingAllocator, SimulatedOutOfMemory
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.memory.virtual.accounting_mode import AccountingMode
from lightning_memtools.memory.virtual.ledger import VirtualLedger
from lightning_memtools.memory.virtual.module_scopes import ModuleNames
from lightning_memtools.memory.virtual.patches import Patches, behave_like_cuda
from lightning_memtools.simulation.cuda_ops.autocast import cuda_autocast
from lightning_memtools.simulation.cuda_ops.functions import CudaFunctions
from lightning_memtools.simulation.cuda_ops.kernels import KERNELS, SIZED
from lightning_memtools.simulation.fakes import copy_optimizer
from lightning_memtools.state.random_state import random_streams_restored

Device = Literal["cpu", "cuda-like", "cuda"]
Forward = Callable[[nn.Module, Any], Any]
"""Runs the forward pass with the model and batch it is given, fake ones, and returns what backward starts from."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: what is traced.

    Attributes:
        model: The model, which is not touched.
        batch: What the forward pass is given, tensors in any nesting; not touched either.
        forward: Runs the forward pass.
        optimizers: Optimizers whose state takes memory beside the model.
        device: Whose operators it is traced with: "cpu"; "cuda"; or "cuda-like", those of a
            `VirtualDevice(cuda_like=True)` over a real run on the CPU, which has CUDA's dropout masks and optimizers.
    """

    model: nn.Module
    batch: Any
    forward: Forward
    optimizers: tuple[Optimizer, ...] = ()
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a traced step needs.

    Attributes:
        peak_bytes: The highest that was allocated.
        static_bytes: What was allocated before the step: parameters, gradients, optimizer state, the batch.
        operations: Floating-point operations of matrix products and convolutions, and one for each element that any
            other operator made.
        flops: The former alone, which is what torch's FlopCounterMode counts.
    """

    peak_bytes: int
    static_bytes: int
    operations: int
    flops: int

    @property
    def activation_bytes(self) -> int:
        """The part of the peak that the step itself made."""
        return self.peak_bytes - self.static_bytes


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and answers where a fake tensor is asked for a number: with 1, so that logging goes on."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in AccountingMode: torch would wrap __torch_dispatch__ so that it is never compiled, which takes time.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number_like(args[0])
        out = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self.flops += flops
            self.total += flops
        elif not getattr(func, "is_view", False):
            self.total += sum(
                one.numel() for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, Tensor)
            )
        return out


class Trace:
    """A fake copy of a step's model in a simulated allocator of its own."""

    def __init__(self, step: Step, model: nn.Module, ledger: VirtualLedger, counted: OperationCount) -> None:
        self.model = model
        self.ledger = ledger
        self.counted = counted
        self._step = step
        self._peak = 0
        self._batch = fake_values(step.batch)
        self._optimizers: list[Any] = []

    def allocated(self) -> int:
        """Bytes allocated now."""
        self.ledger.settle()
        return self.ledger.allocator.allocated

    def peak_since(self) -> int:
        """The highest that was allocated since the last call of this function."""
        self.ledger.settle()
        peak = self.ledger.allocator.stats().peak_allocated or 0
        self._peak = max(self._peak, peak)
        self.ledger.reset_peaks()
        return peak

    @contextmanager
    def aside(self) -> Iterator[list[int]]:
        """What runs within is no part of the step; afterwards the list has the most that it allocated, in bytes."""
        self.peak_since()
        peak, before, counted = self._peak, self.allocated(), (self.counted.total, self.counted.flops)
        found: list[int] = []
        yield found
        found.append(self.peak_since() - before)
        self._peak = peak
        self.counted.total, self.counted.flops = counted

    def peak_so_far(self) -> int:
        """The highest that was allocated since the last call of `peak_since`, which goes on."""
        return self.ledger.allocator.stats().peak_allocated or 0

    def prepare(self) -> None:
        """Put the model, its gradients and the optimizers' state on the device."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.ledger.add(tensor.untyped_storage(), Category.PARAMETER, "")
        for tensor in tree_leaves(self._batch):
            if isinstance(tensor, Tensor):
                self.ledger.add(tensor.untyped_storage(), Category.INPUT, "")
        self._make_gradients()
        of = dict(zip(map(id, self._step.model.parameters()), self.model.parameters(), strict=True))
        for one in self._step.optimizers:
            clone = copy_optimizer(one, lambda parameter: of.get(id(parameter)), with_state=False)
            clone.step()
            self._optimizers.append(clone)

    def run(
        self, around_forward: Callable[[], Any] = nullcontext, before_backward: Callable[[], None] = lambda: None
    ) -> Cost:
        """Run the step as Lightning does: forward, zero_grad, backward, optimizer."""
        self._peak = 0
        self.ledger.reset_peaks()
        static = self.allocated()
        self.counted.total = self.counted.flops = 0
        with around_forward():
            loss = _scalar(self._step.forward(self.model, self._batch))
        self.model.zero_grad(set_to_none=True)
        before_backward()
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        operations, flops = self.counted.total, self.counted.flops
        del loss
        for one in self._optimizers:
            one.step()
        self.peak_since()
        return Cost(self._peak, static, operations, flops)

    def let_go(self) -> None:
        """Forget the step that is traced."""
        del self._step

    def _make_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)


@contextmanager
def tracing(step: Step) -> Iterator[Trace]:
    """Make a fake copy of a step's model and trace with it, apart from any VirtualDevice that is entered."""
    patches = Patches()
    ledger = VirtualLedger(CachingAllocator(AllocatorConfig.parse("")))
    active = VirtualDevice.current()
    with ExitStack() as stack:
        stack.enter_context(active.host() if active is not None else nullcontext())
        stack.enter_context(random_streams_restored())
        stack.callback(patches.undo)
        if step.device != "cpu":
            behave_like_cuda(patches)
        if step.device == "cuda":
            stack.enter_context(cuda_autocast())
        stack.enter_context(fake_mode())
        model = fake_model(step.model)
        kernels = SIZED | (KERNELS if step.device == "cuda" else {})
        stack.enter_context(AccountingMode(ledger, ModuleNames(), error_of=_error, replacements=kernels))
        if step.device == "cuda":
            stack.enter_context(CudaFunctions())
        counted = stack.enter_context(OperationCount())
        trace = Trace(step, model, ledger, counted)
        trace.prepare()
        # Hooks make cycles of the trace: without this the step's real batch would live until these are collected.
        stack.callback(trace.let_go)
        yield trace


def device_of(*, cuda: bool) -> Device:
    """Whose operators a step is to be traced with: those of the device that it will run on."""
    if cuda:
        return "cuda"
    virtual = VirtualDevice.current()
    return "cuda-like" if virtual is not None and virtual.cuda_like else "cpu"


def _error(failure: SimulatedOutOfMemory) -> torch.OutOfMemoryError:
    # There is no limit here; the accounting asks for a way to say that one is reached.
    return torch.OutOfMemoryError(str(failure))


def _scalar(value: Any) -> Tensor | None:
    """What backward can start from: the loss, or the sum of everything a model returned."""
    tensors = [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.requires_grad]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    sums = [one.real.sum() if one.is_complex() else one.sum() for one in tensors]
    return torch.stack([one.float() for one in sums]).sum() if len(sums) > 1 else (sums[0] if sums else None)


def _number_like(tensor: Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
