"""Applies a plan to a model and undoes it: no module is added, replaced or renamed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memtools._torch import StatisticsNorm, tree_flatten, tree_unflatten
from lightning_memtools.checkpointing.chains import forward_of_class, passes_through
from lightning_memtools.checkpointing.drawn_streams import DrawnStreams
from lightning_memtools.checkpointing.exact_recomputation import LaterRun, RunLog, updates_statistics
from lightning_memtools.checkpointing.host_inputs import inputs_in_host_memory
from lightning_memtools.checkpointing.key_value_caches import caches_off, holds_cache, modules_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.checkpointing.repetition_proof import (
    RecomputationDiffersWarning,
    holds_fake_tensors,
    layer_that_differs,
)


class Range(NamedTuple):
    """Layers `start` to `stop` (exclusive) of a chain that keep only their input, and run again in backward."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The part of a plan that concerns one Sequential or module.

    Attributes:
        name: The qualified name of the Sequential or module.
        layers: The qualified names of its layers.
        ranges: The layers that are recomputed; the others run as usual.
        is_module: Whether this is one module with a forward of its own, which is its only layer.
    """

    name: str
    layers: tuple[str, ...]
    ranges: tuple[Range, ...]
    is_module: bool = False


class _PlainState:
    """A module's `__getstate__` while a plan is applied: copies and pickles are of the module as its class made it.

    pickle, torch.save, copy.copy and copy.deepcopy all ask the object, not its class, for it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> dict[str, Any]:
        module = self._module
        state: dict[str, Any] = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key not in {"forward", "__getstate__"}}


class _Proofs:
    """Which ranges were proved to repeat themselves, by their place, and which layers were found not to.

    Args:
        wanted: Whether ranges are proved at all.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.differing: dict[str, str] = {}
        self._wanted = wanted
        self._repeats: dict[tuple[str, int], bool] = {}

    def repeats(self, place: tuple[str, int], names: Sequence[str], given: Any, prove: Any) -> bool:
        """Return whether a range may be recomputed; runs it to find out when it is called for the first time."""
        if not self._wanted:
            return True
        if place not in self._repeats:
            if holds_fake_tensors(given):
                return True
            found = prove()
            self._repeats[place] = found is None
            if found is not None:
                layer, evidence = names[min(found[0], len(names) - 1)], found[1]
                self.differing[layer] = evidence
                warnings.warn(
                    f"The layer {layer} did not do the same when it was run again ({evidence}), so what would be "
                    "recomputed together with it runs as usual. Leave it out with "
                    f"exclude=[{layer!r}], so that the rest can be recomputed.",
                    RecomputationDiffersWarning,
                    stacklevel=2,
                )
        return self._repeats[place]


class _PlannedParts:
    """Runs a Sequential or module under a plan. A range is recomputed only if it was proved to repeat itself.

    Args:
        module: The Sequential or module.
        plan: What to recompute of it.
        layers: Its layers.
        proofs: Which ranges repeat themselves.
        offload: Whether the inputs of ranges are kept in host memory.
    """

    def __init__(
        self, module: nn.Module, plan: ChainPlan, layers: Sequence[nn.Module], proofs: _Proofs, *, offload: bool
    ) -> None:
        self._module, self._plan, self._layers = module, plan, tuple(layers)
        self._trained = module.training
        self._norms = [[part for part in layer.modules() if isinstance(part, StatisticsNorm)] for layer in layers]
        self._streams = DrawnStreams(part for layer in layers for part in layer.modules())
        self._proofs, self._offload = proofs, offload

    def _recompute(self, one: Range, calls: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run calls one after the other; the first takes the arguments. They run again in backward."""
        norms: list[nn.Module] = [
            part for layer in self._norms[one.start : one.stop] for part in layer if updates_statistics(part)
        ]
        names = self._plan.layers[one.start : one.stop]

        def run(note: Any, *args: Any, **kwargs: Any) -> Any:
            # One name for what is passed on: a second one would keep alive what the next layer could free.
            value = calls[0](*args, **kwargs)
            note(value)
            for call in calls[1:]:
                value = call(value)
                note(value)
            return value

        def proof() -> Any:
            def run_apart(note: Any) -> None:
                own_args, own_kwargs = tree_unflatten(*tree_flatten((args, kwargs)))  # in lists that it may change
                run(note, *own_args, **own_kwargs)

            return layer_that_differs(run_apart, self._layers[one.start : one.stop], norms, self._streams)

        if not self._proofs.repeats((self._plan.name, one.start), names, (args, kwargs), proof):
            return run(lambda _: None, *args, **kwargs)
        with inputs_in_host_memory() if self._offload else nullcontext():
            return _checkpointed(run, names, norms, self._streams, (args, kwargs))


class _PlannedChain(_PlannedParts):
    """The forward of a Sequential that recomputes some of its layers."""

    def __call__(self, input: Any) -> Any:  # noqa: A002, Sequential's own name, which callers may use
        chain: Any = self._module
        # A chain that was changed since (chain[3] = ..., append) is no longer the one that was planned.
        if passes_through(chain, trained=self._trained) or not self._is_as_planned():
            return type(chain).forward(chain, input)
        position = 0
        for one in (*self._plan.ranges, Range(len(self._layers), len(self._layers))):
            for layer in self._layers[position : one.start]:
                input = layer(input)  # noqa: A001, as above
            if one.start < one.stop:
                input = self._recompute(one, self._layers[one.start : one.stop], (input,), {})  # noqa: A001, as above
            position = one.stop
        return input

    def _is_as_planned(self) -> bool:
        now = list(_flat_layers(self._module, set(map(id, self._layers))))
        return len(now) == len(self._layers) and all(a is b for a, b in zip(now, self._layers, strict=True))


class _PlannedModule(_PlannedParts):
    """The forward of a module that is recomputed as a whole."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plainly = forward_of_class(self._module)
        if passes_through(self._module, trained=self._trained) or holds_cache(args, kwargs):
            return plainly(*args, **kwargs)
        return self._recompute(Range(0, 1), [plainly], args, kwargs)


class _WithoutCaches:
    """The forward of a model whose caches of keys and values are off while it is trained."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = module.training
        self._inner = vars(module).get("forward") or forward_of_class(module)
        # `generate`, which may run in validation, looks at the names of the arguments.
        self.__signature__ = signature(forward_of_class(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if passes_through(self._module, trained=self._trained):
            return self._inner(*args, **kwargs)
        with caches_off(self._module):
            return self._inner(*args, **kwargs)


def _checkpointed(
    run: Any,
    names: Sequence[str],
    norms: Sequence[nn.Module],
    streams: DrawnStreams,
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> Any:
    log = RunLog(names)
    states = streams.now()
    # Flat, because tensors are only kept through autograd's own means (which an enclosing range needs) as arguments.
    flat, structure = tree_flatten(given)
    # Each once: attention that is given one tensor as query, key and value does something else with three equal ones.
    different = {id(one): one for one in flat}
    order = {each: at for at, each in enumerate(different)}
    places = [order[id(one)] for one in flat]
    # The first run takes what was given itself: the code around sees what a module replaces in a list of its arguments.
    first = [given]

    def run_flat(*different: Any) -> Any:
        args, kwargs = first.pop() if first else tree_unflatten([different[at] for at in places], structure)
        log.begin()
        return run(log.note_output, *args, **kwargs)

    return checkpoint(
        run_flat,
        *different.values(),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (nullcontext(), LaterRun(norms, states)),
    )


class AppliedPlan:
    """A plan that is applied to a model. `remove` undoes it, as does leaving it as a context manager.

    Copies and pickles made meanwhile are of the plain model. Calls in evaluation mode and without gradients are
    unchanged.

    Args:
        model: The model.
        plans: What to recompute.
        heads: The linear layers whose loss is computed in chunks.
        offload: Keep the inputs of what is recomputed in host memory.
        prove: Run every range two more times at its first call, and compare all values bit for bit: a range that does
            not repeat itself runs as usual from then on, with a warning that names the layer. Check the first loss in
            chunks, too.

    Attributes:
        heads: The layers whose loss is computed in chunks, and what became of it, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Iterable[ChainPlan],
        *,
        heads: Iterable[str] = (),
        offload: bool = False,
        prove: bool = False,
    ) -> None:
        self.heads: dict[str, DeferredHead] = {}
        self._modules: list[nn.Module] = []
        self._proofs = _Proofs(wanted=prove)
        self._offload = offload
        try:
            for plan in plans:
                if plan.ranges:
                    self._apply(model, plan)
            if self._modules:
                for module in modules_with_caches(model).values():
                    self._replace(module, _WithoutCaches(module))
            for name in heads:
                head: Any = _plain_module(model, name)
                self.heads[name] = DeferredHead(name, head, check=prove)
                self._replace(head, self.heads[name])
        except BaseException:
            self.remove()
            raise

    @property
    def differing(self) -> dict[str, str]:
        """The layers that did not repeat themselves, with the evidence."""
        return self._proofs.differing

    def remove(self) -> None:
        """Undo the plan. Calling it twice does no harm."""
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

    def _apply(self, model: nn.Module, plan: ChainPlan) -> None:
        module = _plain_module(model, plan.name)
        layers = [_found(model, name, plan.name) for name in plan.layers]
        kind = _PlannedModule if plan.is_module else _PlannedChain
        self._replace(module, kind(module, plan, layers, self._proofs, offload=self._offload))

    def _replace(self, module: nn.Module, forward: Any) -> None:
        vars(module)["forward"] = forward
        vars(module)["__getstate__"] = _PlainState(module)
        self._modules.append(module)


def _plain_module(model: nn.Module, name: str) -> nn.Module:
    module = _found(model, name, name)
    if "forward" in vars(module):
        raise RuntimeError(
            f"{name or type(module).__name__} has a forward of its own instance already, of another plan or of another "
            "library. Remove that one first."
        )
    return module


def _found(model: nn.Module, name: str, planned: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"The plan for {planned or type(model).__name__} does not suit this model ({error}): it was made for one "
            "that is built otherwise. Make a plan for this model."
        ) from None


def _flat_layers(chain: Any, known: set[int]) -> Iterable[nn.Module]:
    """Yield a chain's layers as the plan names them: a Sequential in it is one layer if it was, or else its layers."""
    for child in chain:
        if id(child) in known or not isinstance(child, nn.Sequential):
            yield child
        else:
            yield from _flat_layers(child, known)
