"""Applies a plan to a model and undoes it: no module is added, replaced or renamed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from inspect import signature
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memtools._torch import StatisticsNorm, tree_flatten, tree_unflatten
from lightning_memtools.checkpointing.chains import forward_of_class, passes_through
from lightning_memtools.checkpointing.drawn_streams import DrawnStreams
from lightning_memtools.checkpointing.exact_recomputation import RunLog, contexts, updates_statistics
from lightning_memtools.checkpointing.host_offload import HostOffload
from lightning_memtools.checkpointing.key_value_caches import caches_off, holds_cache, modules_with_caches
from lightning_memtools.checkpointing.loss_head import DeferredHead
from lightning_memtools.checkpointing.memory_model import ChainPlan, Range, Ranges, pieces
from lightning_memtools.checkpointing.repetition_proof import (
    RecomputationDiffersWarning,
    holds_fake_tensors,
    layer_that_differs,
)


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


class _PlannedChain:
    """The forward of a Sequential that recomputes some of its layers, or keeps what they save in host memory."""

    def __init__(
        self, chain: nn.Sequential, plan: ChainPlan, layers: Sequence[nn.Module], proofs: _Proofs, host: HostOffload
    ) -> None:
        self._chain = chain
        self._trained = chain.training
        self._layers = tuple(layers)
        self._names = plan.layers
        self._ranges = plan.ranges
        self._offloaded, self._host = frozenset(plan.offloaded), host
        self._norms = [[part for part in layer.modules() if isinstance(part, StatisticsNorm)] for layer in layers]
        self._streams = DrawnStreams(part for layer in layers for part in layer.modules())
        self._proofs = proofs

    def __call__(self, input: Any) -> Any:  # noqa: A002, Sequential's own name, which callers may use
        chain = self._chain
        # A chain that was changed since (chain[3] = ..., append) is no longer the one that was planned.
        if passes_through(chain, trained=self._trained) or not self._is_as_planned():
            return type(chain).forward(chain, input)  # type: ignore[no-untyped-call]
        return self._run(input, 0, len(self._layers), self._ranges, None)

    def _is_as_planned(self) -> bool:
        now = list(_flat_layers(self._chain, set(map(id, self._layers))))
        return len(now) == len(self._layers) and all(a is b for a, b in zip(now, self._layers, strict=True))

    def _run(self, value: Any, start: int, stop: int, ranges: Ranges, log: RunLog | None) -> Any:
        # One name for what is passed on, in one frame: a second one would keep alive what the next layer could free.
        for piece in pieces(start, stop, ranges):
            first, last = (piece, piece + 1) if isinstance(piece, int) else (piece.start, piece.stop)
            is_offloaded = log is None and first in self._offloaded
            with self._host.unit(self._layers[first:last]) if is_offloaded else nullcontext():
                if isinstance(piece, int):
                    value = self._layers[piece](value)
                elif log is None and not self._repeats(piece, value):
                    for at in range(piece.start, piece.stop):
                        value = self._layers[at](value)
                else:
                    value = self._run_range(value, piece)
            if log is not None:
                log.note_output(value)
        return value

    def _repeats(self, one: Range, value: Any) -> bool:
        def run(note: Any) -> None:
            passed = _with_own_containers(value)
            for layer in layers:
                passed = layer(passed)
                note(passed)

        layers = self._layers[one.start : one.stop]
        return self._proofs.repeats(
            (self._names[one.start], one.stop),
            self._names[one.start : one.stop],
            value,
            lambda: layer_that_differs(run, layers, self._norms_of(one), self._streams),
        )

    def _run_range(self, value: Any, one: Range) -> Any:
        def run(log: RunLog, value: Any) -> Any:
            return self._run(value, one.start, one.stop, one.inner, log)

        return _recomputed(run, self._names_of(one), self._norms_of(one), self._streams, ((value,), {}), kept=one.kept)

    def _norms_of(self, one: Range) -> list[nn.Module]:
        return [part for layer in self._norms[one.start : one.stop] for part in layer if updates_statistics(part)]

    def _names_of(self, one: Range) -> list[str]:
        return [
            self._names[piece.start if isinstance(piece, Range) else piece]
            for piece in pieces(one.start, one.stop, one.inner)
        ]


class _PlannedModule:
    """The forward of a module that is recomputed as a whole, or keeps what it saves in host memory, or both."""

    def __init__(self, module: nn.Module, plan: ChainPlan, proofs: _Proofs, host: HostOffload) -> None:
        self._module = module
        self._name = plan.name
        self._range = plan.ranges[0] if plan.ranges else None
        self._host = host if plan.offloaded else None
        self._trained = module.training
        self._streams = DrawnStreams(module.modules())
        self._proofs = proofs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if passes_through(self._module, trained=self._trained) or holds_cache(args, kwargs):
            return self._plainly(*args, **kwargs)
        with nullcontext() if self._host is None else self._host.unit([self._module]):
            if self._range is None or not self._repeats(args, kwargs):
                return self._plainly(*args, **kwargs)
            return self._run_range(self._range, args, kwargs)

    def _run_range(self, one: Range, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(log: RunLog, *args: Any, **kwargs: Any) -> Any:
            out = self._plainly(*args, **kwargs)
            log.note_output(out)
            return out

        return _recomputed(run, [self._name], self._norms(), self._streams, (args, kwargs), kept=one.kept)

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        return forward_of_class(self._module)(*args, **kwargs)

    def _repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        def run(note: Any) -> None:
            own_args, own_kwargs = _with_own_containers((args, kwargs))
            note(self._plainly(*own_args, **own_kwargs))

        return self._proofs.repeats(
            (self._name, 0),
            [self._name],
            (args, kwargs),
            lambda: layer_that_differs(run, [self._module], self._norms(), self._streams),
        )

    def _norms(self) -> list[nn.Module]:
        return [part for part in self._module.modules() if updates_statistics(part)]


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


def _with_own_containers(value: Any) -> Any:
    """Return the same tensors in other lists and dictionaries, which a run may change without anybody noticing."""
    return tree_unflatten(*tree_flatten(value))


def _recomputed(
    run: Any,
    names: list[str],
    modules: list[nn.Module],
    streams: DrawnStreams,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    kept: Collection[int],
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
        return run(log, *args, **kwargs)

    return checkpoint(
        run_flat,
        *different.values(),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: contexts(modules, log, states, kept),
    )


class AppliedPlan:
    """A plan that is applied to a model. `remove` undoes it, as does leaving it as a context manager.

    Copies and pickles made meanwhile are of the plain model. Calls in evaluation mode and without gradients are
    unchanged.

    Args:
        model: The model.
        plans: What to recompute, and what to keep in host memory.
        heads: The linear layers whose loss is computed in chunks.
        prove: Run every range two more times at its first call, and compare all values bit for bit: a range that does
            not repeat itself runs as usual from then on, with a warning that names the layer. Check the first loss in
            chunks, too.

    Attributes:
        heads: The layers whose loss is computed in chunks, and what became of it, by name.
    """

    def __init__(
        self, model: nn.Module, plans: Iterable[ChainPlan], *, heads: Iterable[str] = (), prove: bool = False
    ) -> None:
        self.heads: dict[str, DeferredHead] = {}
        self._modules: list[nn.Module] = []
        self._proofs = _Proofs(wanted=prove)
        self._host = HostOffload()
        try:
            for plan in plans:
                if plan.is_applied:
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
        forward: _PlannedModule | _PlannedChain
        if plan.is_module:
            forward = _PlannedModule(module, plan, self._proofs, self._host)
        else:
            assert isinstance(module, nn.Sequential)
            forward = _PlannedChain(module, plan, layers, self._proofs, self._host)
        self._replace(module, forward)

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


def _flat_layers(chain: nn.Sequential, known: set[int]) -> Iterable[nn.Module]:
    """Yield a chain's layers as the plan names them: a Sequential in it is one layer if it was, or else its layers."""
    for child in chain:
        if id(child) in known or not isinstance(child, nn.Sequential):
            yield child
        else:
            yield from _flat_layers(child, known)
