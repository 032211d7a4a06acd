"""Finds what a plan may recompute: a model's Sequentials, its modules with own forwards, or what patterns name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from lightning_memtools._torch import compiled_call, has_hooks, is_fsdp_module, is_jit_tracing, registered_children
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, CheckpointOptionsError
from lightning_memtools.checkpointing.exact_recomputation import why_outside
from lightning_memtools.warning_categories import DegradedWarning

_SHARDED = "sharded by FSDP 2: it may only be recomputed by itself"


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers that run one after the other, and which of them may not be recomputed.

    Attributes:
        name: The Sequential's qualified name in the model; "" for the model itself.
        layers: The qualified names of its layers, those of nested plain Sequentials in their place.
        outside: Why layers must stay outside of recomputed ranges, by index.
        is_module: Whether this is one module with a forward of its own, which is then its only layer.
        forced: Whether a pattern named this module, so that it is recomputed by every plan.
    """

    name: str
    layers: tuple[str, ...]
    outside: dict[int, str]
    is_module: bool = False
    forced: bool = False


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class, which may be a static method, to be called without the module."""
    own = getattr_static(type(module), "forward")
    return own.__func__ if isinstance(own, staticmethod) else partial(type(module).forward, module)


def passes_through(module: nn.Module, *, trained: bool) -> bool:
    """Return whether a call runs as usual: without gradients (nothing is kept), in evaluation, and for compilers.

    `trained` is the mode in which the plan was applied: a model that is trained in evaluation mode is recomputed in it.
    """
    return (
        not torch.is_grad_enabled()
        or (trained and not module.training)
        or torch.compiler.is_compiling()
        or is_jit_tracing()
    )


class NothingToApplyTo(DegradedWarning):
    """There is no chain in the model that recomputation could be applied to."""


def is_plain(module: nn.Module) -> bool:
    """Return whether a module runs its children one after the other, as Sequential itself does."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and not is_compiled(module)
        and not is_fsdp_module(module)
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's call is compiled by torch.compile."""
    return compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"


def find_chains(model: nn.Module, options: CheckpointOptions) -> list[Chain]:
    """Return every chain of a model that the options ask for, outermost first, in the order of registration.

    Raises:
        ValueError: A pattern matches no module.
    """
    modules = dict(model.named_modules())
    excluded = {name for pattern in options.exclude for name in _matches(modules, pattern, "exclude")}
    if options.include is None:
        taken = [name for name, module in modules.items() if is_plain(module) and len(module) > 0]
    else:
        found = {name for pattern in options.include for name in _matches(modules, pattern, "include")}
        taken = [
            name
            for name in modules
            if name in found and not any(name != other and is_within(name, other) for other in found)
        ]
    compiled = [name for name, module in modules.items() if is_compiled(module)]
    chains: list[Chain] = []
    flattened: set[str] = set()
    for name in taken:
        if name in flattened or any(is_within(name, one) for one in (*excluded, *compiled)):
            continue
        module = modules[name]
        if is_plain(module):
            layers = list(_layers(name, module, flattened))
            chains.append(Chain(name, tuple(layers), _outside(modules, layers, options, excluded)))
        else:
            chains.append(
                Chain(
                    name,
                    (name,),
                    _outside(modules, [name], options, excluded, is_module=True),
                    is_module=True,
                    forced=True,
                )
            )
    return chains


def find_modules(model: nn.Module, chains: Sequence[Chain], options: CheckpointOptions) -> list[Chain]:
    """Return the modules that can be recomputed as a whole besides the layers of chains: each is a chain of its own.

    These have a forward of their own, as blocks in a ModuleList have and what is inside of them, or FSDP 2 shards them:
    what runs again inside one sharded module finds its parameters gathered. What only a step can show, whether they run
    at all and can run again, is for its trace to say.
    """
    modules = dict(model.named_modules())
    excluded = {name for pattern in options.exclude for name in _matches(modules, pattern, "exclude")}
    known = {layer for chain in chains for at, layer in enumerate(chain.layers) if chain.outside.get(at) != _SHARDED}
    known |= {chain.name for chain in chains}
    compiled = [name for name, module in modules.items() if is_compiled(module)]
    return [
        Chain(name, (name,), _outside(modules, [name], options, excluded, is_module=True), is_module=True)
        for name, module in modules.items()
        if name
        and name not in known
        and not is_plain(module)
        # Another library's forward cannot be replaced, and a script's or a compiled module's neither.
        and "forward" not in vars(module)
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict, torch.jit.ScriptModule))
        and not any(is_within(name, other) for other in compiled)
        and not any(map(is_fsdp_module, list(module.modules())[1:]))
    ]


def outermost(chains: Sequence[Chain]) -> list[Chain]:
    """Return the Sequentials that lie in no other one."""
    found = [chain for chain in chains if not chain.is_module]
    return [one for one in found if not any(one is not other and is_within(one.name, other.name) for other in found)]


def nothing_found_message(model: nn.Module, options: CheckpointOptions) -> str:
    """Return what was looked for, and which patterns would match something."""
    looked_for = (
        "nn.Sequential modules with Sequential's own forward, and other modules worth running twice"
        if options.include is None
        else f"modules that match include={list(options.include)}"
    )
    text = f"GradientCheckpointing has nothing to apply to in {type(model).__name__}: it looked for {looked_for}"
    if options.exclude:
        text += f", except exclude={list(options.exclude)}"
    if any(is_compiled(module) for module in model.modules()):
        text += ", and leaves compiled modules alone (torch._functorch.config.activation_memory_budget is for these)"
    return f"{text}. Name blocks with include=[...]."


def _layers(name: str, module: nn.Module, flattened: set[str]) -> Iterator[str]:
    for key, child in registered_children(module):
        path = f"{name}.{key}" if name else key
        # A Sequential with hooks must be called as a whole for them to fire.
        if is_plain(child) and len(child) > 0 and not has_hooks(child):  # type: ignore[arg-type]
            flattened.add(path)
            yield from _layers(path, child, flattened)
        else:
            yield path


def _outside(
    modules: dict[str, nn.Module],
    layers: Sequence[str],
    options: CheckpointOptions,
    excluded: set[str],
    *,
    is_module: bool = False,
) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for index, path in enumerate(layers):
        layer = _module_at(modules, path)
        if any(is_within(path, one) or is_within(one, path) for one in excluded):
            reasons[index] = "excluded"
            continue
        if any(is_within(one, path) for one in options.differing):
            reasons[index] = "it did not do the same when it ran again"
            continue
        if any(is_compiled(part) for part in layer.modules()):
            reasons[index] = "compiled"
            continue
        if any(map(is_fsdp_module, layer.modules())) and not is_module:
            reasons[index] = _SHARDED
            continue
        reason = why_outside(layer, options.bn_dropout)
        if reason is not None:
            reasons[index] = reason
    return reasons


def _module_at(modules: dict[str, nn.Module], path: str) -> nn.Module:
    # named_modules names a shared module once; its other paths are found step by step.
    if path in modules:
        return modules[path]
    return modules[""].get_submodule(path)


def _matches(modules: dict[str, nn.Module], pattern: str, option: str) -> list[str]:
    names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        within = [name for name in modules if name and pattern.split("*", maxsplit=1)[0].rstrip(".") in name][:5]
        close = within or difflib.get_close_matches(pattern, modules, n=5) or [*modules][1:6]
        raise CheckpointOptionsError(
            f"{option}: the pattern {pattern!r} matches no module of {type(modules['']).__name__}. Examples of its "
            f"names: {', '.join(map(repr, close))}; '*' stands for any characters."
        )
    return names


def is_within(name: str, ancestor: str) -> bool:
    """Return whether a module is another one or lies within it, by their qualified names."""
    return name == ancestor or name.startswith(f"{ancestor}.") or ancestor == ""


def ancestors(name: str) -> set[str]:
    """Return the qualified names of the modules that a module lies in."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(len(parts))} if name else set()
