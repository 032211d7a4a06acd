"""Finds what a plan can recompute: a model's Sequentials, modules with their own forward, or what patterns name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_memtools._torch import compiled_call, hooks_of, is_fsdp_module, registered_children
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, CheckpointOptionsError
from lightning_memtools.checkpointing.exact_recomputation import why_outside

_SHARDED = "sharded by FSDP 2: it may only be recomputed by itself"


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers that run one after the other, and the reasons why some of them must not be recomputed.

    Attributes:
        name: The Sequential's qualified name in the model; "" for the model itself.
        layers: The qualified names of its layers; a plain Sequential among them is replaced by its own layers.
        outside: For each layer (by index) that must not be recomputed, the reason.
        is_module: True for a module that is not a Sequential. `layers` then contains only the module itself.
    """

    name: str
    layers: tuple[str, ...]
    outside: dict[int, str]
    is_module: bool = False


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that a module's class defines, ready to call, even if the instance overrides it."""
    own = getattr_static(type(module), "forward")
    return own.__func__ if isinstance(own, staticmethod) else MethodType(type(module).forward, module)


def passes_through(module: nn.Module, *, trained: bool) -> bool:
    """Return True if a module must not be recomputed now: without gradients, in eval mode, or during compilation.

    `trained` says whether the module was in training mode when the plan was applied. If not, eval mode is ignored.
    """
    return (
        not torch.is_grad_enabled()
        or (trained and not module.training)
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def is_plain(module: nn.Module) -> bool:
    """Return True if a module is an ordinary Sequential: its forward is not replaced, compiled or sharded."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and not is_compiled(module)
        and not is_fsdp_module(module)
    )


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module has been compiled by torch.compile."""
    return compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"


def find_chains(model: nn.Module, options: CheckpointOptions) -> list[Chain]:
    """Return the Sequentials whose layers may be recomputed according to the options, outermost first.

    Raises:
        ValueError: A pattern matches no module.
    """
    names = _Names(model, options)
    chains: list[Chain] = []
    flattened: set[str] = set()
    for name, module in names.eligible.items():
        if name not in flattened and is_plain(module) and len(module) > 0:
            layers = list(_layers(name, module, flattened))
            chains.append(Chain(name, tuple(layers), names.outside(layers)))
    return chains


def find_modules(model: nn.Module, chains: Sequence[Chain], options: CheckpointOptions) -> list[Chain]:
    """Return the modules that can be recomputed as a whole, each as a Chain of one layer. Skip layers of `chains`.

    Examples are the blocks in a ModuleList, and the modules inside these blocks. Modules sharded by FSDP 2 are
    included, because their parameters are gathered again for recomputation. Whether a module runs at all, and
    whether it may run twice, is only known after tracing a step.
    """
    names = _Names(model, options)
    known = {layer for chain in chains for at, layer in enumerate(chain.layers) if chain.outside.get(at) != _SHARDED}
    known |= {chain.name for chain in chains}
    return [
        Chain(name, (name,), names.outside([name], is_module=True), is_module=True)
        for name, module in names.eligible.items()
        if name
        and name not in known
        and not is_plain(module)
        # Another library's forward cannot be replaced, and a script's or a compiled module's neither.
        and "forward" not in vars(module)
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule))
        and not any(map(is_fsdp_module, list(module.modules())[1:]))
    ]


class _Names:
    """The modules of a model by name, and which of them may be recomputed according to the options."""

    def __init__(self, model: nn.Module, options: CheckpointOptions) -> None:
        self.modules = dict(model.named_modules())
        self.excluded = {name for pattern in options.exclude for name in _matches(self.modules, pattern, "exclude")}
        compiled = [name for name, module in self.modules.items() if is_compiled(module)]
        included = {name for pattern in options.include or ["*"] for name in _matches(self.modules, pattern, "include")}
        self.eligible = {
            name: module
            for name, module in self.modules.items()
            if name in included and not any(is_within(name, other) for other in (*self.excluded, *compiled))
        }
        self._bn_dropout = options.bn_dropout

    def outside(self, layers: Sequence[str], *, is_module: bool = False) -> dict[int, str]:
        """Return {index: reason} for layers that must not be recomputed. `is_module` permits sharding by FSDP."""
        reasons = {at: self._why_outside(path, is_module=is_module) for at, path in enumerate(layers)}
        return {at: reason for at, reason in reasons.items() if reason is not None}

    def _why_outside(self, path: str, *, is_module: bool) -> str | None:
        # named_modules names a shared module once; its other paths are looked up step by step.
        layer = self.modules.get(path) or self.modules[""].get_submodule(path)
        if any(is_within(path, name) or is_within(name, path) for name in self.excluded):
            return "excluded"
        if any(is_compiled(part) for part in layer.modules()):
            return "compiled"
        if any(map(is_fsdp_module, layer.modules())) and not is_module:
            return _SHARDED
        return why_outside(layer, self._bn_dropout)


def outermost(chains: Sequence[Chain]) -> list[Chain]:
    """Return the Sequentials that are not inside another Sequential."""
    rows = [chain for chain in chains if not chain.is_module]
    return [row for row in rows if not any(row is not other and is_within(row.name, other.name) for other in rows)]


def _layers(name: str, module: nn.Module, flattened: set[str]) -> Iterator[str]:
    for key, child in registered_children(module):
        path = f"{name}.{key}" if name else key
        # A Sequential with hooks must be called as a whole for them to fire.
        if is_plain(child) and len(child) > 0 and not hooks_of(child):  # type: ignore[arg-type]
            flattened.add(path)
            yield from _layers(path, child, flattened)
        else:
            yield path


def _matches(modules: dict[str, nn.Module], pattern: str, option: str) -> list[str]:
    names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        close = difflib.get_close_matches(pattern, modules, n=5) or [*modules][1:6]
        raise CheckpointOptionsError(
            f"{option}: the pattern {pattern!r} matches no module of {type(modules['']).__name__}. Examples of its "
            f"names: {', '.join(map(repr, close))}; '*' stands for any characters."
        )
    return names


def is_within(name: str, ancestor: str) -> bool:
    """Return True if the module named `name` is the module named `ancestor`, or is inside it."""
    return name == ancestor or name.startswith(f"{ancestor}.") or ancestor == ""
