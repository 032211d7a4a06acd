"""Putting on the device what was made before it was entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.virtual.attribution import gradient_of, parameters_of
from lightning_memtools.memory.virtual.categories import Category

Enter = Callable[[torch.Tensor, Category | None], object]


def enter_all(thing: nn.Module | Optimizer | torch.Tensor, enter: Enter) -> None:
    """Enter a tensor, or each of a module (gradients too) or of an optimizer (parameters, gradients and state)."""
    if isinstance(thing, nn.Module):
        # In the order of `module.cuda()`, because blocks are placed in it: children first, a gradient after its
        # parameter, buffers last.
        for child in thing.children():
            enter_all(child, enter)
        _enter_parameters(thing.parameters(recurse=False), enter)
        for buffer in thing.buffers(recurse=False):
            enter(buffer, Category.BUFFER)
    elif isinstance(thing, Optimizer):
        _enter_parameters(parameters_of(thing), enter)
        for tensor in tensors_in(dict(thing.state)):
            enter(tensor, Category.OPTIMIZER)
    else:
        enter(thing, None)


def trackable(thing: object) -> Iterator[nn.Module | Optimizer | torch.Tensor]:
    """The modules, optimizers and tensors in a nesting of containers; of a wrapped optimizer, what it wraps."""
    if isinstance(thing, (nn.Module, Optimizer, torch.Tensor)):
        yield thing
    elif isinstance(getattr(thing, "optimizer", None), Optimizer):
        # Lightning's optimizers are such wrappers.
        yield thing.optimizer  # type: ignore[attr-defined]
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from trackable(value)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from trackable(value)
    elif hasattr(thing, "__dict__") and not callable(thing):
        yield from tensors_in(thing)


def _enter_parameters(parameters: Iterator[torch.Tensor], enter: Enter) -> None:
    for parameter in parameters:
        enter(parameter, Category.PARAMETER)
        gradient = gradient_of(parameter)
        if gradient is not None:
            enter(gradient, Category.GRADIENT)
