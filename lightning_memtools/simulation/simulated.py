"""Lets the steps of a module run on fake tensors and on a virtual device of their own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_memtools._torch import FAKE_TENSOR_LOGGER
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.cuda_ops.autocast import cuda_autocast
from lightning_memtools.simulation.cuda_ops.functions import CudaFunctions
from lightning_memtools.simulation.cuda_ops.kernels import KERNELS, SIZED
from lightning_memtools.simulation.cuda_ops.moves import AlreadyOnCuda
from lightning_memtools.simulation.fakes import RealExchange, TensorExchange, borrowed, fake_mode
from lightning_memtools.state.random_state import random_streams_restored


@contextmanager
def simulated(model: nn.Module, device: VirtualDevice, exchange: TensorExchange, *, cuda: bool) -> Iterator[None]:
    """Within, a module's tensors are fakes on a virtual device, and nothing that its steps do is left afterwards.

    Args:
        model: The module; it is put on the device.
        device: The device. It takes the place of one that is entered already.
        exchange: Makes the fakes. With a `RealExchange` they are copies of the real tensors, which are computed on the
            CPU: then only those of CUDA's ways are taken that exist there, its dropout masks and optimizers.
        cuda: Operators take CUDA's memory, not that of the CPU.
    """
    values = isinstance(exchange, RealExchange)
    active = VirtualDevice.current()
    with ExitStack() as stack:
        if active is not None:
            stack.enter_context(active.suspended())
        # Fakes draw no numbers, but a step may seed a generator or draw from one on the host.
        stack.enter_context(random_streams_restored())
        stack.enter_context(_quiet())
        stack.enter_context(torch.enable_grad())
        if not values:
            if cuda:
                stack.enter_context(cuda_autocast())
            stack.enter_context(fake_mode())
            # Real tensors need results of the right values and sizes, which replacements do not give.
            device.replace_operators({**SIZED, **(KERNELS if cuda else {})})
        stack.enter_context(borrowed([model], exchange))
        if not values:
            _skip_checks(model)
        stack.enter_context(device)
        if cuda and not values:
            stack.enter_context(CudaFunctions())
        if cuda:
            stack.enter_context(AlreadyOnCuda())
        if _holds_tensors(model):
            device.track(model)
        yield


def _skip_checks(model: nn.Module) -> None:
    """Metrics of torchmetrics look at values before they count; the checks keep nothing. Undone with `borrowed`."""
    for part in model.modules():
        if vars(part).get("validate_args") is True:
            vars(part)["validate_args"] = False


def _holds_tensors(model: nn.Module) -> bool:
    return next(model.parameters(), None) is not None or next(model.buffers(), None) is not None


@contextmanager
def _quiet() -> Iterator[None]:
    # torch logs a traceback of its own for a wrong shape, above the user's error.
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Advice on how the user trains (a scheduler that steps first, say) belongs into training.
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled
