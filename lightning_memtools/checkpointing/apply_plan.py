"""Applies a plan to a model and undoes it: no module is added, replaced or renamed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import nn

from lightning_memtools._torch import StatisticsNorm
from lightning_memtools.checkpointing.chains import forward_of_class, passes_through
from lightning_memtools.checkpointing.exact_recomputation import own_streams, recomputed, updates_statistics
from lightning_memtools.checkpointing.key_value_caches import WithoutCaches, holds_cache, modules_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.checkpointing.repetition_proof import (
    RecomputationDiffersWarning,
    holds_fake_tensors,
    layer_that_differs,
)


class Range(NamedTuple):
    """Layers to recompute: those from `start` to `stop` (exclusive) of a Sequential. Only their input is kept."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The layers that a checkpointing plan recomputes in one Sequential, or one other module as a whole.

    Attributes:
        name: The qualified name of the Sequential or module.
        layers: The qualified names of all its layers, also of those that are not recomputed.
        ranges: The ranges of consecutive layers that are recomputed. All other layers run as usual.
        is_module: True for a module that is not a Sequential. `layers` then contains only the module itself.
    """

    name: str
    layers: tuple[str, ...]
    ranges: tuple[Range, ...]
    is_module: bool = False


class AppliedPlan:
    """Applies a checkpointing plan to a model. Calling `remove`, or leaving the `with` block, undoes the plan.

    Copies and pickles made while the plan is applied contain the unchanged model. Nothing is recomputed for calls in
    evaluation mode or without gradients.

    Args:
        model: The model.
        plans: For each Sequential or module in the plan, the ranges of its layers to recompute.
        heads: The names of the linear layers whose cross-entropy loss is computed in chunks.
        prove: Run each range of layers two more times at its first call, and compare all values bit for bit. If they
            differ, the range is no longer recomputed, and a warning names the layer.

    Attributes:
        heads: For each linear layer in the argument `heads` (by name), the object that replaces its forward.
    """

    def __init__(
        self, model: nn.Module, plans: Iterable[ChainPlan], *, heads: Iterable[str] = (), prove: bool = False
    ) -> None:
        self.heads: dict[str, DeferredHead] = {}
        self._modules: list[nn.Module] = []
        try:
            for plan in plans:
                if plan.ranges:
                    module = _plain_module(model, plan.name)
                    layers = [model.get_submodule(name) for name in plan.layers]
                    self._replace(module, _PlannedForward(module, plan, layers, prove=prove))
            for module in modules_with_caches(model).values() if self._modules else ():
                self._replace(module, WithoutCaches(module))
            for name in heads:
                head: Any = _plain_module(model, name)
                self.heads[name] = DeferredHead(name, head, warns=prove)
                self._replace(head, self.heads[name])
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Undo the plan. Idempotent."""
        while self._modules:
            module = self._modules.pop()
            for name in ("forward", "__getstate__"):
                vars(module).pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _replace(self, module: nn.Module, forward: Any) -> None:
        vars(module)["forward"] = update_wrapper(forward, forward_of_class(module), updated=())
        vars(module)["__getstate__"] = partial(_plain_state, module)
        self._modules.append(module)


class _PlannedForward:
    """Replaces the forward of a Sequential or other module, so that backward recomputes the layers that a plan names.

    Args:
        module: The Sequential or module.
        plan: Says which ranges of layers to recompute.
        layers: The layers of the Sequential.
        prove: Run each range two more times at its first call, and do not recompute it if the values differ.
    """

    def __init__(self, module: nn.Module, plan: ChainPlan, layers: list[nn.Module], *, prove: bool) -> None:
        self._module, self._plan, self._layers = module, plan, layers
        self._trained = module.training
        self._norms = [[part for part in layer.modules() if isinstance(part, StatisticsNorm)] for layer in layers]
        self._streams = own_streams(part for layer in layers for part in layer.modules())
        self._prove = prove
        self._repeats: dict[Range, bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plainly = forward_of_class(self._module)
        if passes_through(self._module, trained=self._trained) or holds_cache(args, kwargs):
            return plainly(*args, **kwargs)
        if self._plan.is_module:
            return self._recompute(Range(0, 1), [plainly], args, kwargs)
        # A chain that was changed since (chain[3] = ..., append) is no longer the one that was planned.
        now = _flat_layers(self._module, set(map(id, self._layers)))
        if len(args) + len(kwargs) != 1 or [*now] != self._layers:
            return plainly(*args, **kwargs)
        value, position = args[0] if args else next(iter(kwargs.values())), 0
        del args, kwargs  # a second name for the input would keep it alive
        for layers in (*self._plan.ranges, Range(len(self._layers), len(self._layers))):
            for layer in self._layers[position : layers.start]:
                value = layer(value)
            if layers.start < layers.stop:
                value = self._recompute(layers, self._layers[layers.start : layers.stop], (value,), {})
            position = layers.stop
        return value

    def _recompute(self, which: Range, calls: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layers in `which`, and run them again in backward. `calls` has one function for each layer."""
        layers, names = self._layers[which.start : which.stop], self._plan.layers[which.start : which.stop]
        norms: list[nn.Module] = [
            part for of_layer in self._norms[which.start : which.stop] for part in of_layer if updates_statistics(part)
        ]

        def run(note: Any, args: Any, kwargs: Any) -> Any:
            # One name for what is passed on: a second one would keep alive what the next layer could free.
            value = calls[0](*args, **kwargs)
            del args, kwargs
            note(value)
            for call in calls[1:]:
                value = call(value)
                note(value)
            return value

        if self._prove and which not in self._repeats and not holds_fake_tensors((args, kwargs)):
            differs = layer_that_differs(run, (args, kwargs), layers, norms, self._streams)
            self._repeats[which] = differs is None
            if differs is not None:
                layer, evidence = names[min(differs[0], len(names) - 1)], differs[1]
                warnings.warn(
                    f"The layer {layer} did not do the same when it was run again ({evidence}), so what would be "
                    "recomputed together with it runs as usual. Leave it out with "
                    f"exclude=[{layer!r}], so that the rest can be recomputed.",
                    RecomputationDiffersWarning,
                    stacklevel=2,
                )
        unwatched = partial(run, lambda _: None)
        if not self._repeats.get(which, True):
            return unwatched(args, kwargs)
        return recomputed(unwatched, norms, self._streams, (args, kwargs))


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's `__dict__` without what the plan added, so that copies and pickles hold the original.

    The plan sets this function as `__getstate__` of the module, where pickle and copy.deepcopy call it.
    """
    state: dict[str, Any] = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    return {key: value for key, value in state.items() if key not in {"forward", "__getstate__"}}


def _plain_module(model: nn.Module, name: str) -> nn.Module:
    module = model.get_submodule(name)
    if "forward" in vars(module):
        raise RuntimeError(
            f"{name or type(module).__name__} has a forward of its own instance already, of another plan or of another "
            "library. Remove that one first."
        )
    return module


def _flat_layers(chain: Any, known: set[int]) -> Iterator[nn.Module]:
    """Yield the layers of a Sequential, and of Sequentials inside it unless `known` contains their ids."""
    for child in chain:
        if id(child) in known or not isinstance(child, nn.Sequential):
            yield child
        else:
            yield from _flat_layers(child, known)
