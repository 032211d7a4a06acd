"""What modules are called: their path below the outermost module seen."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn


class ModuleNames:
    """Paths of modules such as ``"ResNet.layer1.0.conv1"``, by identity; knows modules without keeping them alive."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: list[weakref.ref[nn.Module]] = []

    def of(self, module: nn.Module, caller: str | None) -> str:
        """A module's path. A module not seen before is named after its class, below its caller where it has one."""
        known = self._named.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        name = type(module).__name__
        if caller is None:
            self.add_root(module)
            return self._named[id(module)][1]
        return self._add_tree(module, f"{caller}.{name}")

    def add_root(self, module: nn.Module) -> None:
        """Name a module and all below it, unless it has a name already."""
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
        """The outermost modules that are still alive."""
        yield from (module for module in (root() for root in self._roots) if module is not None)

    def _add_tree(self, top: nn.Module, top_name: str) -> str:
        for path, module in top.named_modules():
            # A module that was outermost until its parent was seen gets its path in the parent.
            self._named[id(module)] = (weakref.ref(module), f"{top_name}.{path}" if path else top_name)
        return top_name

    def _forget_dead(self) -> None:
        self._roots = [root for root in self._roots if root() is not None]
        self._named = {key: known for key, known in self._named.items() if known[0]() is not None}
