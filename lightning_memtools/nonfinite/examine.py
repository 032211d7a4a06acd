"""Collects what this rank can tell about a bad step. Waits for the device; once per run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from lightning_memtools.nonfinite.batches import bad_inputs
from lightning_memtools.nonfinite.confirm import BadTensor, find_bad
from lightning_memtools.nonfinite.detect import floats_of, norms_of
from lightning_memtools.nonfinite.names import plain_name
from lightning_memtools.nonfinite.step import Evidence, Trip


def examine(
    model: Module, trip: Trip, *, rank: int = 0, unkept: tuple[str, ...] = (), carried: bool = False
) -> Evidence:
    """Look at the step's batches, losses, gradients and at the weights. Call it once the step has been undone.

    Args:
        model: The module that is trained.
        trip: The bad step.
        rank: Which rank this is.
        unkept: Buffers that could not be put back.
        carried: Whether bad losses are made known to other ranks as NaN gradients.
    """
    step = trip.step
    indices = [micro.index for micro in step.micro for _ in micro.losses]
    optimizer = step.optimizer
    tensors = [*model.parameters(), *step.parameters]
    groups = optimizer.param_groups if optimizer else ()
    return Evidence(
        rank=rank,
        step=step.number,
        batches=tuple(micro.index for micro in step.micro),
        losses=tuple(zip(indices, trip.losses, strict=True)),
        norm=trip.norm,
        gradients=trip.gradients,
        parameters=tuple(bad_state(model)),
        inputs=tuple(bad for micro in step.micro for bad in bad_inputs(micro)),
        unseen=tuple(micro.index for micro in step.micro if micro.batch is None),
        learning_rates=tuple(float(group["lr"]) for group in groups if "lr" in group),
        weight_norm=_norm(list(step.parameters)),
        plain_sgd=isinstance(optimizer, SGD),
        float16=bool(trip.scaler) or any(tensor.dtype == torch.float16 for tensor in tensors),
        scaler=trip.scaler,
        late=trip.late,
        carried=carried and not all(map(math.isfinite, trip.losses)),
        unkept=unkept,
    )


def bad_state(model: Module) -> list[BadTensor]:
    """Parameters that hold NaN or Inf, and buffers that hold NaN: masks and bounds may be infinite by right."""
    parameters = find_bad((plain_name(name), parameter) for name, parameter in model.named_parameters())
    buffers = find_bad((plain_name(name), buffer) for name, buffer in model.named_buffers())
    return [*parameters, *(buffer for buffer in buffers if buffer.n_nan)]


def bad_optimizer_state(model: Module, optimizers: Iterable[Optimizer]) -> list[BadTensor]:
    """Entries of the optimizers' states that hold NaN or Inf."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return find_bad(
        (f"{key} of {names.get(id(parameter), 'a parameter')}", value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, Tensor)
    )


def _norm(tensors: list[Tensor]) -> float:
    floats = [each for tensor in tensors if (each := floats_of(tensor)) is not None]
    return math.hypot(*(float(norm) for norm in norms_of(floats)))
