"""Tracks the module that is being called and its name, which decide the category of the memory allocated in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_memtools._torch import AccumulateGrad, current_autograd_node, current_graph_task
from lightning_memtools.memory.virtual.categories import Category
from lightning_memtools.memory.virtual.ledger import VirtualLedger
from lightning_memtools.memory.virtual.storages import flat, parts, storage_key

OUTSIDE = "(outside)"
OPTIMIZER = "(optimizer)"
BACKWARD = "(backward)"


class ModuleScopes:
    """Keeps one thread's stack of calls of modules and optimizers.

    Attributes:
        scopes: The names of the calls, innermost last: a module's name, `OPTIMIZER` for an optimizer's step, or
            `OUTSIDE` for the closure of a step.
        counts_on_host: Whether the optimizer that made the last step keeps its step counts in host memory.
    """

    def __init__(self, ledger: VirtualLedger) -> None:
        self.scopes: list[str] = []
        self.counts_on_host = False
        self._ledger = ledger

    def tell_listener(self) -> None:
        """Tell the device's listener which module is being called now."""
        if self._ledger.listener is not None:
            self._ledger.listener.on_module(self.scopes[-1] if self.scopes else OUTSIDE)

    def leave_to(self, depth: int) -> None:
        """Shorten `scopes` to `depth` entries, because the other calls have returned or raised."""
        del self.scopes[depth:]
        self.tell_listener()

    def leave_step(self) -> None:
        """If `scopes` ends with an optimizer's step, remove that entry: the step has returned or raised."""
        while self.scopes and self.scopes[-1] is OPTIMIZER:
            self.scopes.pop()

    @property
    def in_step(self) -> bool:
        """True within an optimizer's step, but not within its closure."""
        return bool(self.scopes) and self.scopes[-1] is OPTIMIZER

    @property
    def caller(self) -> str | None:
        """The name of the module that is being called; None outside of all modules."""
        scope = self.scopes[-1] if self.scopes else OUTSIDE
        return None if scope is OUTSIDE or scope is OPTIMIZER else scope

    def purpose(self, args: Any, kwargs: Any) -> tuple[Category, str]:
        """Return the category and the module for memory that an operator with these arguments allocates now."""
        scope = self.scopes[-1] if self.scopes else OUTSIDE
        if current_graph_task() != -1:
            if isinstance(current_autograd_node(), AccumulateGrad):
                return Category.GRADIENT, BACKWARD
            return Category.ACTIVATION, BACKWARD if scope is OUTSIDE or scope is OPTIMIZER else scope
        if scope is OPTIMIZER:
            return Category.OPTIMIZER, scope
        if scope is not OUTSIDE or self._follows_activations(args, kwargs):
            return Category.ACTIVATION, scope
        return Category.OTHER, scope

    def _follows_activations(self, args: Any, kwargs: Any) -> bool:
        records = torch.is_grad_enabled()
        for tensor in (*flat(args), *flat(tuple(kwargs.values()))):
            if records and tensor.requires_grad:
                return True
            for part in parts(tensor):
                entry = self._ledger.find(storage_key(part))
                if entry is not None and entry.category is Category.ACTIVATION:
                    return True
        return False


class ModuleNames:
    """Gives modules names such as ``"ResNet.layer1.0.conv1"``, without keeping the modules alive."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: list[weakref.ref[nn.Module]] = []

    def of(self, module: nn.Module, caller: str | None) -> str:
        """Return a module's name. A new module is named after its class, prefixed by the name of `caller` if given."""
        known = self._named.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        name = type(module).__name__
        if caller is None:
            self.add_root(module)
            return self._named[id(module)][1]
        return self._add_tree(module, f"{caller}.{name}")

    def add_root(self, module: nn.Module) -> None:
        """Name a module and all its submodules, unless the module has a name already."""
        known = self._named.get(id(module))
        if known is not None and known[0]() is module:
            return
        self._forget_dead()
        name = type(module).__name__
        taken = {self._named[id(root)][1] for root in self.roots()}
        same = sum(other == name or other.startswith(f"{name}#") for other in taken)
        self._roots.append(weakref.ref(module))
        self._add_tree(module, f"{name}#{same + 1}" if same else name)

    def roots(self) -> Iterator[nn.Module]:
        """Yield the outermost modules that are still alive."""
        yield from (module for module in (root() for root in self._roots) if module is not None)

    def _add_tree(self, top: nn.Module, top_name: str) -> str:
        for path, module in top.named_modules():
            # A module that was outermost until its parent was called is renamed to its path in the parent.
            self._named[id(module)] = (weakref.ref(module), f"{top_name}.{path}" if path else top_name)
        return top_name

    def _forget_dead(self) -> None:
        self._roots = [root for root in self._roots if root() is not None]
        self._named = {key: known for key, known in self._named.items() if known[0]() is not None}
