"""Runs layers twice with the effects of a single run, and names the layers for which that is impossible."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memtools._torch import (
    AnyBatchNorm,
    AnyDropout,
    StatisticsNorm,
    iterates_power,
    tree_flatten,
    tree_unflatten,
)
from lightning_memtools.memory.reachable_variables import values_named_in_steps
from lightning_memtools.state.random_state import generator_state, set_generator_state

# By name, for libraries that are not imported here: torchvision has StochasticDepth, timm DropPath and DropBlock2d.
_DROPOUTS_BY_NAME = {"StochasticDepth", "DropPath", "DropBlock2d", "PatchDropout", "DropBlock"}
_RATES = ("p", "drop_prob")

Stream = Any
"""A random generator of torch, Python or NumPy."""


def is_dropout(module: nn.Module) -> bool:
    """Return True if a module is a dropout layer of any kind, in training mode and with a rate above 0."""
    if not isinstance(module, AnyDropout) and type(module).__name__ not in _DROPOUTS_BY_NAME:
        return False
    rate = next((getattr(module, name) for name in _RATES if hasattr(module, name)), None)
    return module.training and not (isinstance(rate, (int, float)) and rate == 0)


def is_special(module: nn.Module) -> bool:
    """Return True for a BatchNorm or dropout layer in training mode, to which the option `bn_dropout` applies."""
    return is_dropout(module) or (isinstance(module, AnyBatchNorm) and module.training)


def updates_statistics(module: nn.Module) -> bool:
    """Return True if a forward pass of this module updates running statistics, as BatchNorm does in training."""
    return isinstance(module, StatisticsNorm) and module.training and module.track_running_stats


def why_outside(layer: nn.Module, bn_dropout: str) -> str | None:
    """Return the reason why a layer must not be recomputed, or None. `bn_dropout` is "skip" or "recompute"."""
    trained = [part for part in layer.modules() if part.training]
    if any(isinstance(part, nn.SyncBatchNorm) for part in trained):
        return "SyncBatchNorm talks to other ranks"
    if any(map(iterates_power, trained)):
        return "power iteration (spectral_norm) would run twice"
    if bn_dropout == "skip" and is_special(layer):
        return f"{type(layer).__name__} never runs twice"
    return None


@contextmanager
def statistics_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: let modules update copies of their running statistics, so that the originals do not change.

    Outputs are not affected, since a batch in training is normalized by its own statistics. Setting momentum to 0
    instead would not be safe: for an infinite activation, 0 * inf would turn the statistics into NaN.
    """
    originals: list[tuple[nn.Module, dict[str, Tensor]]] = []
    try:
        for module in modules:
            buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
            originals.append((module, buffers))
            for name, tensor in buffers.items():
                setattr(module, name, tensor.clone())
        yield
    finally:
        # In the opposite order: a module that is listed twice gets its own buffers back.
        for module, buffers in reversed(originals):
            for name, tensor in buffers.items():
                setattr(module, name, tensor)


def own_streams(modules: Iterable[nn.Module]) -> list[Stream]:
    """Return the random generators that modules use besides the global ones.

    The search covers attributes, lists and dictionaries in attributes, and the variables that the forward refers to.
    A generator that a layer creates later is not found.
    """
    return list({id(one): one for one in _values_of(modules) if generator_state(one) is not None}.values())


def stream_states(own: Sequence[Stream]) -> list[tuple[Stream, Any]]:
    """Return the generators in `own` and the global ones of Python and NumPy, each with its current state."""
    return [(stream, generator_state(stream)) for stream in (*_global_streams(), *own)]


@contextmanager
def streams_set_to(states: Sequence[tuple[Stream, Any]]) -> Iterator[None]:
    """Context manager: set random generators to the given states; on exit, restore their previous states."""
    present = [(stream, generator_state(stream)) for stream, _ in states]
    _set(states)
    try:
        yield
    finally:
        _set(present)


def _set(states: Iterable[tuple[Stream, Any]]) -> None:
    for stream, state in states:
        set_generator_state(stream, state)


def _global_streams() -> Iterator[Stream]:
    # The functions of each module are methods of one generator.
    python: Any = random
    yield python.getstate.__self__
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random.get_state.__self__


def _values_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    kinds: set[type] = set()
    for module in modules:
        for value in vars(module).values():
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        if type(module) not in kinds:
            kinds.add(type(module))
            yield from values_named_in_steps(type(module))


def recomputed(
    run: Callable[[Any, Any], Any], norms: Sequence[nn.Module], streams: Sequence[Stream], given: tuple[Any, Any]
) -> Any:
    """Run layers without keeping their activations, and return their output. They run again in backward.

    Args:
        run: A function that runs the layers one after the other. It gets the two parts of `given` as arguments.
        norms: Those modules within the layers that update running statistics.
        streams: The random generators that the layers use, as returned by `own_streams`.
        given: The positional and the keyword arguments of the first layer.
    """
    states = stream_states(streams)
    # Flat, because tensors are only kept through autograd's own means (which an enclosing range needs) as arguments.
    flat, structure = tree_flatten(given)
    # Each once: attention that is given one tensor as query, key and value does something else with three equal ones.
    different = {id(each): each for each in flat}
    order = {each: at for at, each in enumerate(different)}
    places = [order[id(each)] for each in flat]
    # The first run takes what was given itself: the code around sees what a module replaces in a list of its arguments.
    first = [given]

    def run_flat(*different: Any) -> Any:
        if first:
            return run(*first.pop())
        args, kwargs = tree_unflatten([different[at] for at in places], structure)
        # A later run leaves running statistics as they are, and draws the random numbers of the first one.
        with statistics_untouched([module for module in norms if updates_statistics(module)]), streams_set_to(states):
            return run(args, kwargs)

    return checkpoint(run_flat, *different.values(), use_reentrant=False, preserve_rng_state=True)
