"""The training that the doctor examines: its objects and settings, and what was noted in its first steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.null_cuda.launch import computes_nothing

Shape = tuple[int, ...]


class SumOverBatch(NamedTuple):
    """A term of the loss that sums over the batch. `way` holds the gradients at each node from the loss to the sum."""

    place: str
    shape: Shape
    way: tuple[list[Tensor], ...]


class UpdateNorms(NamedTuple):
    """The parameters of an optimizer before an update, with the norms of gradients and weights, kept on the device."""

    optimizer: Optimizer
    held: list[str]
    gradients: tuple[list[str], Tensor]
    weights: tuple[list[str], Tensor]
    """Of the parameters with weight decay; none at most updates."""


@dataclass(slots=True, kw_only=True)
class TrainingCase:
    """The objects and settings of a training run that the checks read, and the values that the checks recorded."""

    model: nn.Module
    optimizers: Sequence[Optimizer] = ()
    train_loader: Any = None
    n_train_batches: int | None = None  # in an epoch, where it is known
    accumulate: int = 1  # the batches per update, by which Lightning divides the loss
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    world_size: int = 1
    local_ranks: int = 1  # those on this machine
    sharded: bool = False  # parameters and gradients are spread over ranks, so that one rank sees only parts
    others: Sequence[Any] = ()  # further objects of the user that may hold tensors
    stop_at: Any = None  # searches for holders do not enter it

    # Schedulers with their interval, "step" or "epoch", their steps in this training, and those by the other interval.
    schedulers: list[tuple[Any, str, float, float]] = field(default_factory=list)

    n_steps: int = 0  # training batches that have been watched
    batch_size: int = 1  # of the first batch
    batch_shapes: frozenset[Shape] = frozenset()  # of its tensors, without dimensions of size 1
    free_shared: int | None = None  # bytes of shared memory, before the loaders' workers filled it
    sums: Sequence[SumOverBatch] = ()  # in the first loss
    updates: list[UpdateNorms] = field(default_factory=list)
    marks: list[weakref.ref[Any]] = field(default_factory=list)  # alive as long as the graph of their step
    # By name, with the weights and the count of writes of their statistics at the start.
    frozen_norms: Sequence[tuple[str, Any, list[float], int]] = ()

    @property
    def computes_nothing(self) -> bool:
        """True in a dry run, where nothing is computed and values must not be checked."""
        return computes_nothing(self.device)

    def parameter_names(self) -> dict[int, str]:
        """Return a dict from the `id` of each of the model's parameters to its name."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}


def without_ones(shape: Iterable[int]) -> Shape:
    """Return a shape without its dimensions of size 1."""
    return tuple(size for size in shape if size != 1)
