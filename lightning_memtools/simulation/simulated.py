"""Runs the steps of a module on fake tensors and on a virtual device of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_memtools._torch import fake_mode, fakes_copied_deeply, stores_gradient, without_sharding_hooks
from lightning_memtools.memory.cuda_ops.attention import FUSED_ATTENTION
from lightning_memtools.memory.cuda_ops.functions import CUDNN, ReplacedFunctions, cuda_functions
from lightning_memtools.memory.cuda_ops.reductions import REDUCTIONS
from lightning_memtools.memory.cuda_ops.rules import RULES, Call, Rule
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import TensorExchange, borrowed
from lightning_memtools.simulation.followed_functions import value_readers
from lightning_memtools.simulation.known_values import KnownValues, values_known
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes
from lightning_memtools.simulation.step_trainer import quiet
from lightning_memtools.state.random_state import random_streams_restored

aten = torch.ops.aten


def _clone(call: Call) -> Any:
    """Clone a sparse tensor with all its values. FakeTensorMode would return a clone without values.

    Autograd stores a real sparse gradient without copying if nothing else refers to it, but always clones a fake
    gradient. Such a clone therefore shares the original's memory, so that no extra memory is counted.
    """
    source = call.args[0]
    if source.layout is not torch.sparse_coo:
        return call.results()
    parts = [call.run(each, source) for each in (aten._indices.default, aten._values.default)]
    if not stores_gradient():
        parts = [call.run(call.func, part) for part in parts]
    dimensions = source.sparse_dim(), source.dense_dim(), source.shape
    options = {"dtype": source.dtype, "layout": source.layout, "device": source.device}
    return call.run(aten._sparse_coo_tensor_with_dims_and_tensors.default, *dimensions, *parts, **options)


def _grouped_mm(call: Call) -> Any:
    """Allocate the result of a grouped matrix product. FakeTensorMode refuses float32, although torch supports it."""
    left, right, *more = call.args
    groups = [] if left.dim() != right.dim() else [len(left) if left.dim() > 2 else len(more[0])]  # noqa: PLR2004
    shape, step = [*groups, left.shape[-2], right.shape[-1]], 16 // left.element_size()
    width = -(-shape[-1] // step) * step  # rows begin at multiples of 16 bytes
    strides = [shape[-2] * width, width, 1][-len(shape) :]
    return call.run(aten.empty_strided.default, shape, strides, dtype=left.dtype, device=left.device)


# Of operators that make other tensors of fakes than of real tensors, whatever device is simulated.
_FAKE_RULES: dict[Any, Rule] = {
    aten.clone.default: _clone,
    aten._grouped_mm.default: _grouped_mm,
}


@contextmanager
def simulated(
    model: nn.Module, device: VirtualDevice, exchange: TensorExchange, *, cuda: bool
) -> Iterator[KnownValues]:
    """Context manager: replace a model's tensors with fakes on a virtual device. On exit, restore the model.

    A model sharded by FSDP 2 is unsharded within the context. Yield the known values of the step's tensors.

    Args:
        model: The module, which is put on the device.
        device: The virtual device. Another virtual device that is already active is suspended meanwhile.
        exchange: Makes the fakes.
        cuda: True to allocate what CUDA kernels allocate (the device must be ``cuda_like``); False for CPU kernels.
    """
    active = VirtualDevice.current()
    with ExitStack() as stack:
        stack.enter_context(gc_frozen())
        if active is not None:
            stack.enter_context(active.suspended())
        # Fake tensors draw no random numbers, but a step may seed a generator or draw from one on the host.
        stack.enter_context(random_streams_restored())
        stack.enter_context(quiet())
        stack.enter_context(torch.enable_grad())
        known = stack.enter_context(values_known())
        stack.enter_context(mode := fake_mode())
        replaced = cuda_functions(device.gpu) if cuda else {}
        replaced |= value_readers(known, replaced)
        device.run_operators_by(RepeatedFakes(mode, known).run)
        stack.enter_context(fakes_copied_deeply())
        device.apply_rules({**_FAKE_RULES, **({**RULES, **REDUCTIONS, **FUSED_ATTENTION, **CUDNN} if cuda else {})})
        stack.enter_context(without_sharding_hooks(model))
        stack.enter_context(device)
        with device.host():
            stack.enter_context(borrowed(model, exchange))
        _skip_checks(model)
        stack.enter_context(ReplacedFunctions(replaced))
        # Weights of recurrent layers move into another buffer, and what they leave is free.
        exchange.forget_memory()
        device.track(model)
        yield known


def _skip_checks(model: nn.Module) -> None:
    """Disable torchmetrics' checks of values and SyncBatchNorm's communication. `borrowed` restores both on exit."""
    for part in model.modules():
        if vars(part).get("validate_args") is True:
            vars(part)["validate_args"] = False
        if isinstance(part, nn.SyncBatchNorm):
            # Each rank traces by itself, so the layer cannot exchange statistics with the other ranks.
            vars(part)["forward"] = MethodType(nn.BatchNorm1d.forward, part)
