"""Whose memory it is, found by looking at modules and optimizers as they are now."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import Ledger
from lightning_memtools.memory.virtual.names import ModuleNames
from lightning_memtools.memory.virtual.parts import parts, tensors_in


def attribute(ledger: Ledger, names: ModuleNames, optimizers: Iterable[Optimizer]) -> None:
    """Correct categories and modules of everything that modules and optimizers hold.

    Most is known when it is made. What this adds: gradients set by hand or as views of a bucket (DDP), storages that
    `module.to()` or a deepcopy put in place, and the modules that gradients and optimizer state belong to.
    """

    def note(tensor: torch.Tensor, category: Category, module: str | None) -> None:
        for part in parts(tensor):
            entry = ledger.find(part.untyped_storage()._cdata)
            if entry is not None:
                ledger.assign(entry, category, module)

    owners: dict[int, str] = {}
    for module, name in _named_modules(names):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
            note(parameter, Category.PARAMETER, owners[id(parameter)])
            if parameter.is_leaf and parameter.grad is not None:
                note(parameter.grad, Category.GRADIENT, owners[id(parameter)])
        for buffer in module.buffers(recurse=False):
            note(buffer, Category.BUFFER, name)
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            owner = owners.get(id(parameter))
            note(parameter, Category.PARAMETER, owner)
            if parameter.is_leaf and parameter.grad is not None:
                note(parameter.grad, Category.GRADIENT, owner)
            for tensor in tensors_in(optimizer.state.get(parameter, {})):
                note(tensor, Category.OPTIMIZER, owner)


def _named_modules(names: ModuleNames) -> Iterable[tuple[nn.Module, str]]:
    seen: set[int] = set()
    for root in names.roots():
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module, names.of(module, None)
