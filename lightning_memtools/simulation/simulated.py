"""Runs the steps of a module on fake tensors and on a virtual device of their own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType

import torch
from torch import nn

from lightning_memtools._torch import FAKE_TENSOR_LOGGER, fakes_copied_deeply, without_sharding_hooks
from lightning_memtools.memory.cuda_ops.attention_kernels import FUSED_ATTENTION
from lightning_memtools.memory.cuda_ops.functions import ReplacedFunctions, cuda_functions
from lightning_memtools.memory.cuda_ops.reductions import REDUCTIONS
from lightning_memtools.memory.cuda_ops.rules import RULES
from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fake_rules import FAKE_RULES
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode
from lightning_memtools.simulation.followed_functions import value_readers
from lightning_memtools.simulation.known_values import values_known
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes
from lightning_memtools.state.random_state import random_streams_restored


@contextmanager
def simulated(model: nn.Module, device: VirtualDevice, exchange: TensorExchange, *, cuda: bool) -> Iterator[None]:
    """Make a module's tensors fakes on a virtual device within; afterwards all that its steps changed is restored.

    A model that FSDP 2 shards is whole within.

    Args:
        model: The module; it is put on the device.
        device: The device. A device that is active already is suspended meanwhile.
        exchange: Makes the fakes.
        cuda: Operators allocate what CUDA's kernels allocate, not what the CPU's allocate. The device is ``cuda_like``.
    """
    active = VirtualDevice.current()
    with ExitStack() as stack:
        stack.enter_context(gc_frozen())
        if active is not None:
            stack.enter_context(active.suspended())
        # Fake tensors draw no random numbers, but a step may seed a generator or draw from one on the host.
        stack.enter_context(random_streams_restored())
        stack.enter_context(_quiet())
        stack.enter_context(torch.enable_grad())
        known = stack.enter_context(values_known())
        stack.enter_context(mode := fake_mode())
        stack.enter_context(repeated := RepeatedFakes(mode, known))
        replaced = cuda_functions(device.gpu) if cuda else {}
        replaced |= value_readers(known, replaced)
        device.find_results(repeated.result_of)
        stack.enter_context(fakes_copied_deeply())
        device.apply_rules({**FAKE_RULES, **({**RULES, **REDUCTIONS, **FUSED_ATTENTION} if cuda else {})})
        stack.enter_context(without_sharding_hooks(model))
        stack.enter_context(borrowed([model], exchange))
        _skip_checks(model)
        stack.enter_context(device)
        stack.enter_context(ReplacedFunctions(replaced, is_on_cuda=cuda))
        if _holds_tensors(model):
            if any(isinstance(module, nn.RNNBase) for module in model.modules()):
                exchange.forget_memory()  # the weights move into another buffer, and what they leave is free
            device.track(model)
        yield


def _skip_checks(model: nn.Module) -> None:
    """Switch off torchmetrics' checks, which read values, and exchanges with other ranks. `borrowed` undoes it."""
    for part in model.modules():
        if vars(part).get("validate_args") is True:
            vars(part)["validate_args"] = False
        if isinstance(part, nn.SyncBatchNorm):
            # Each rank traces by itself, so the layer cannot exchange statistics with the other ranks.
            vars(part)["forward"] = MethodType(nn.BatchNorm1d.forward, part)


def _holds_tensors(model: nn.Module) -> bool:
    return next(model.parameters(), None) is not None or next(model.buffers(), None) is not None


@contextmanager
def _quiet() -> Iterator[None]:
    # For a wrong shape torch logs a traceback of its own above the user's error.
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Warnings about how the user trains (a scheduler that steps first, say) are shown in the training itself.
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled
