"""Finds the owners of memory by going through modules and optimizers, and puts their tensors on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.nested_tensors import tensors_in
from lightning_memtools.memory.owned import owned_tensors
from lightning_memtools.memory.virtual.categories import Category, Composition, by_name
from lightning_memtools.memory.virtual.ledger import VirtualLedger
from lightning_memtools.memory.virtual.module_scopes import OUTSIDE, ModuleNames
from lightning_memtools.memory.virtual.storages import parts, storage_key

_CATEGORIES = {
    "parameters": Category.PARAMETER,
    "buffers": Category.BUFFER,
    "gradients": Category.GRADIENT,
    "optimizer": Category.OPTIMIZER,
}


def attribute(ledger: VirtualLedger, names: ModuleNames, optimizers: Iterable[Optimizer]) -> None:
    """Correct the category and module of all memory that modules and optimizers hold.

    Most categories are known when a storage is created, but not for gradients that were set by hand or are views of a
    DDP bucket, nor for storages that `module.to()` or a deepcopy created. The modules that gradients and optimizer
    state belong to are not known either.
    """
    for root in names.roots():
        name = names.of(root, None)
        for owned in owned_tensors(root, optimizers, None):
            module = f"{name}.{owned.module}" if owned.module else name
            _note(ledger, owned.tensor, _CATEGORIES[owned.category], None if owned.module is None else module)
    for optimizer in optimizers:  # a parameter may be in no module
        for parameter in parameters_of(optimizer):
            _note(ledger, parameter, Category.PARAMETER)
            gradient = gradient_of(parameter)
            if gradient is not None:
                _note(ledger, gradient, Category.GRADIENT)


def composition_of(ledger: VirtualLedger) -> Composition:
    """Return the bytes that the ledger holds, by category and by module."""
    by_category = [0] * len(Category)
    by_module: dict[str, list[int]] = defaultdict(lambda: [0] * len(Category))
    held = [(entry.category, entry.module, entry.block.size) for entry in ledger.entries()]
    if ledger.held:
        held.append((Category.OTHER, OUTSIDE, ledger.held))
    for category, module, size in held:
        by_category[category] += size
        by_module[module][category] += size
    return Composition(by_name(by_category), {module: by_name(sizes) for module, sizes in by_module.items()})


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's gradient, or None. Non-leaf tensors always give None, because reading their `grad` warns."""
    return parameter.grad if parameter.is_leaf else None


def _note(ledger: VirtualLedger, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
    for part in parts(tensor):
        entry = ledger.find(storage_key(part))
        if entry is not None:
            ledger.assign(entry, category, module)


Enter = Callable[[torch.Tensor, Category | None], object]


def enter_all(
    thing: nn.Module | Optimizer | torch.Tensor,
    enter: Enter,
    flatten: Callable[[nn.Module, Callable[[torch.Tensor], object]], None] | None = None,
) -> None:
    """Call `enter` for a tensor, or for every tensor of a module or an optimizer, including gradients.

    Args:
        thing: The tensor, module or optimizer.
        enter: Called with a tensor and its category to put it on the device; the category is None for a bare tensor.
        flatten: Called with each module, if given. It merges a recurrent layer's weights into one buffer.
    """
    if isinstance(thing, nn.Module):
        # In the order of `module.cuda()`, which decides where blocks lie: a gradient after its parameter, buffers last.
        for child in thing.children():
            enter_all(child, enter, flatten)
        _enter_parameters(thing.parameters(recurse=False), enter)
        defaults = vars(thing).get("_defaults")  # of a torchmetrics Metric, whose states move too
        states = [defaults, *map(vars(thing).get, defaults)] if isinstance(defaults, dict) else []
        for buffer in (*thing.buffers(recurse=False), *tensors_in(states)):
            enter(buffer, Category.BUFFER)
        if flatten is not None:
            flatten(thing, lambda made: enter(made, Category.PARAMETER))
    elif isinstance(thing, Optimizer):
        _enter_parameters(parameters_of(thing), enter)
        for tensor in tensors_in(dict(thing.state)):
            enter(tensor, Category.OPTIMIZER)
    else:
        enter(thing, None)


def trackable(thing: object) -> Iterator[nn.Module | Optimizer | torch.Tensor]:
    """Yield the modules, optimizers and tensors in nested containers. Optimizers that Lightning wraps are unwrapped."""
    if isinstance(thing, (nn.Module, Optimizer, torch.Tensor)):
        yield thing
    elif isinstance(getattr(thing, "optimizer", None), Optimizer):
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
