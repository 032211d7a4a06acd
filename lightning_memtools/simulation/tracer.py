"""Running the user's step on fake tensors, on a virtual device, with nothing of the user's changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual import Category, VirtualDevice
from lightning_memtools.simulation.ddp_buckets import Buckets, BucketSettings, unwrapped
from lightning_memtools.simulation.fakes import RealExchange, TensorExchange, copy_optimizer
from lightning_memtools.simulation.recording import AllocationRecorder
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step import (
    MakeOptimizer,
    Recipe,
    StepFunction,
    Watch,
    copy_of_batch,
    run_lightning,
    run_module,
)
from lightning_memtools.simulation.trainer_stand_in import is_lightning_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is estimated, as the user gave it.

    Attributes:
        model: Any module.
        step: Computes the loss of a batch, for modules that are no LightningModule or instead of its own step.
        optimizer: An optimizer, its class, a function of the parameters, or None.
        ddp: DDP's buckets; None without DDP.
    """

    model: nn.Module
    step: StepFunction | None = None
    optimizer: Optimizer | type[Optimizer] | MakeOptimizer | None = None
    ddp: BucketSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is simulated.

    Attributes:
        cuda: Operators take CUDA's memory, not that of the CPU.
        allocator: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        cublas_workspace: The size of a cuBLAS workspace.
    """

    cuda: bool
    allocator: str = ""
    cublas_workspace: str = "0MiB"


@dataclass(slots=True)
class Traced:
    """What a trace leaves.

    Attributes:
        device: The device, which accounts for nothing any more.
        recorder: What was allocated and freed on it.
        shapes: Forward output shapes by module, of the first step.
        n_parameters: Elements of the parameters, each counted once.
        n_gradients: Elements of the parameters that got a gradient.
        parameter_bytes: Bytes of parameters and buffers.
    """

    device: VirtualDevice
    recorder: AllocationRecorder
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    n_parameters: int = 0
    n_gradients: int = 0
    parameter_bytes: int = 0


class Tracer(Watch):
    """Gives fake batches to the loop, notes phases, and does what DDP does where a forward pass begins."""

    def __init__(
        self,
        device: VirtualDevice,
        recorder: AllocationRecorder,
        batch: Any,
        dtype: torch.dtype | None,
        buckets: Buckets | None,
        *,
        accumulate: int,
        values: bool,
    ) -> None:
        self._values = values
        self._buckets = buckets
        self._accumulate = accumulate
        self._n_batches = 0
        self._has_new_batch = False
        self._device = device
        self._recorder = recorder
        self._batch = batch
        self._dtype = dtype
        self.optimizers: list[Optimizer] = []

    def begin(self, phase: str, step: int | None = None) -> None:
        """A phase begins."""
        self._recorder.begin(phase, step)
        if phase == "forward" and self._has_new_batch and self._buckets is not None:
            self._has_new_batch = False
            self._buckets.begin_forward(syncs=self._n_batches % self._accumulate == 0)

    def fresh_batch(self) -> Any:
        """A batch of the same sizes, put on the device as a copy to a GPU would."""
        with self._device.host():
            batch = copy_of_batch(self._batch, self._dtype, values=self._values)
        if next(tensors_in(batch), None) is not None:
            self._device.count_batch(batch)
        self._n_batches += 1
        self._has_new_batch = True
        return batch

    def seen(self, optimizers: list[Optimizer]) -> None:
        """An optimizer that has state already brings it along; all live until it is known what is theirs."""
        self.optimizers = optimizers
        for optimizer in optimizers:
            if optimizer.state:
                self._device.track(optimizer)


def trace(subject: Subject, batch: Any, recipe: Recipe, settings: Settings, *, values: bool = False) -> Traced:
    """Run the steps on fake tensors; nothing is computed and the user's objects stay as they are.

    Args:
        subject: What to run.
        batch: What to run it on; only sizes count, but with ``values``.
        recipe: How to run it.
        settings: What to simulate.
        values: Run it on copies of the real tensors instead. They are computed on the CPU, so only those of CUDA's ways
            are taken that exist there: its dropout masks and optimizers.
    """
    device = VirtualDevice(
        allocator=settings.allocator,
        cublas_workspace=settings.cublas_workspace if settings.cuda else "0MiB",
        cuda_like=settings.cuda,
        record=True,
    )
    recorder = AllocationRecorder(device.allocator)
    device.listen(recorder)
    result = Traced(device, recorder)
    dtype = recipe.precision.dtype
    model = unwrapped(subject.model)
    exchange = RealExchange(dtype) if values else TensorExchange(dtype)
    with ExitStack() as stack:
        stack.enter_context(simulated(model, device, exchange, cuda=settings.cuda))
        buckets = None

        def count_bucket(bucket: torch.Tensor) -> None:
            device.assign(bucket, Category.GRADIENT, "(DDP bucket)")

        if subject.ddp is not None:
            buckets = Buckets(model, subject.ddp, count=count_bucket, on_host=not settings.cuda)
        stack.enter_context(_noted_shapes(model, result.shapes))
        tracer = Tracer(device, recorder, batch, dtype, buckets, accumulate=recipe.accumulate, values=values)
        _run(replace(subject, model=model), _make_optimizer(subject, exchange), recipe, tracer)
        # The counts of the first tensors found for each parameter: tied ones count once.
        parameters = list(model.parameters())
        result.n_parameters = sum(parameter.numel() for parameter in parameters)
        result.n_gradients = sum(parameter.numel() for parameter in parameters if parameter.grad is not None)
        result.parameter_bytes = sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *model.buffers()))
        recorder.finish(device)
    return result


def _run(subject: Subject, make_optimizer: MakeOptimizer | None, recipe: Recipe, watch: Watch) -> None:
    model, step = subject.model, subject.step
    if is_lightning_module(model):
        run_lightning(model, step, make_optimizer, recipe, watch)
    else:
        assert step is not None
        run_module(model, step, make_optimizer, recipe, watch)


def _make_optimizer(subject: Subject, exchange: TensorExchange) -> MakeOptimizer | None:
    given = subject.optimizer
    if given is None:
        return None
    if isinstance(given, Optimizer):
        return lambda _parameters: copy_optimizer(given, exchange, with_state=True)

    create: MakeOptimizer = given

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made = create(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer returned {made!r}: it has to return a torch.optim.Optimizer.")
        return made

    return make


@contextmanager
def _noted_shapes(model: nn.Module, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> Iterator[None]:
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
