"""Applies a plan to a model and takes it back: no module is added, replaced or renamed."""

# ruff: noqa: SLF001 - modules, autograd and storages are looked at through torch's own underscored parts, as torch's tools do
from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_memtools.checkpointing.exact import RunLog, contexts
from lightning_memtools.checkpointing.kinds import tracks_statistics
from lightning_memtools.checkpointing.ranges import ChainPlan, Range, Ranges, items


class _Stripped:
    """A module's `__getstate__` while a plan is applied: copies and pickles are of the module as its class made it.

    pickle, torch.save, copy.copy and copy.deepcopy all ask the object, not its class, for it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> dict[str, Any]:
        module = self._module
        own: dict[str, Any] = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
        return {key: value for key, value in own.items() if key not in {"forward", "__getstate__"}}


class _PlannedChain:
    """The forward of a Sequential that runs some of its layers under recomputation."""

    def __init__(self, chain: nn.Sequential, plan: ChainPlan, layers: Sequence[nn.Module]) -> None:
        self._chain = chain
        self._trained = chain.training
        self._layers = tuple(layers)
        self._names = plan.layers
        self._ranges = plan.ranges
        self._tracking = [
            [part for part in layer.modules() if isinstance(part, nn.modules.batchnorm._NormBase)] for layer in layers
        ]

    def __call__(self, input: Any) -> Any:  # noqa: A002, Sequential's own name, which callers may use
        chain = self._chain
        # A chain that was changed since (chain[3] = ..., append) is no longer the one that was planned.
        if _passes_through(chain, trained=self._trained) or not self._is_as_planned():
            return type(chain).forward(chain, input)  # type: ignore[no-untyped-call]
        return self._run(input, 0, len(self._layers), self._ranges, None)

    def _is_as_planned(self) -> bool:
        now = list(_flat_layers(self._chain, set(map(id, self._layers))))
        return len(now) == len(self._layers) and all(a is b for a, b in zip(now, self._layers, strict=True))

    def _run(self, value: Any, start: int, stop: int, ranges: Ranges, log: RunLog | None) -> Any:
        # One name for what is passed on, in one frame: a second would keep what the next layer could let go.
        for item in items(start, stop, ranges):
            value = self._run_range(value, item) if isinstance(item, Range) else self._layers[item](value)
            if log is not None:
                log.note(value)
        return value

    def _run_range(self, value: Any, one: Range) -> Any:
        def run(log: RunLog, value: Any) -> Any:
            return self._run(value, one.start, one.stop, one.inner, log)

        modules: list[nn.Module] = [
            part for layer in self._tracking[one.start : one.stop] for part in layer if tracks_statistics(part)
        ]
        return _recomputed(run, self._names_of(one), modules, (value,), {})

    def _names_of(self, one: Range) -> list[str]:
        return [
            self._names[item.start if isinstance(item, Range) else item]
            for item in items(one.start, one.stop, one.inner)
        ]


class _PlannedModule:
    """The forward of a module that is recomputed as a whole."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._trained = module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if _passes_through(module, trained=self._trained):
            return type(module).forward(module, *args, **kwargs)

        def run(log: RunLog, *args: Any, **kwargs: Any) -> Any:
            out = type(module).forward(module, *args, **kwargs)
            log.note(out)
            return out

        return _recomputed(
            run, [self._name], [part for part in module.modules() if tracks_statistics(part)], args, kwargs
        )


def _passes_through(module: nn.Module, *, trained: bool) -> bool:
    """Whether a call is to run as ever: without gradients, which keeps nothing, in evaluation, and for compilers.

    A model that is trained in evaluation mode (`trained` is the mode in which the plan was applied) is planned as such.
    """
    return (
        not torch.is_grad_enabled()
        or (trained and not module.training)
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
    )


def _recomputed(
    run: Any, names: list[str], modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    log = RunLog(names)
    # Flat, because tensors are only kept through autograd's own means (which an enclosing range needs) as arguments.
    flat, shape = tree_flatten((args, kwargs))

    def run_flat(*flat: Any) -> Any:
        args, kwargs = tree_unflatten(flat, shape)
        log.begin()
        return run(log, *args, **kwargs)

    return checkpoint(
        run_flat, *flat, use_reentrant=False, preserve_rng_state=True, context_fn=lambda: contexts(modules, log)
    )


class Applied:
    """A plan at work in a model: `remove` takes it back, as does leaving it as a context manager.

    Copies and pickles made meanwhile are of the plain model. Calls in evaluation mode and without gradients are
    unchanged.
    """

    def __init__(self, model: nn.Module, plans: Iterable[ChainPlan]) -> None:
        self._modules: list[nn.Module] = []
        for plan in plans:
            if plan.ranges:
                self._apply(model, plan)

    def remove(self) -> None:
        """Take the plan back. Twice does no harm."""
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
        module = model.get_submodule(plan.name)
        if "forward" in vars(module):
            raise RuntimeError(
                f"{plan.name or type(module).__name__} has a forward of its own instance already, of another plan or "
                "of another library. Remove that one first."
            )
        forward: _PlannedModule | _PlannedChain
        if plan.forced:
            forward = _PlannedModule(module, plan.name)
        else:
            assert isinstance(module, nn.Sequential)
            forward = _PlannedChain(module, plan, [model.get_submodule(name) for name in plan.layers])
        vars(module)["forward"] = forward
        vars(module)["__getstate__"] = _Stripped(module)
        self._modules.append(module)


def _flat_layers(chain: nn.Module, known: set[int]) -> Iterable[nn.Module]:
    """A chain's layers as the plan names them: a nested Sequential is one layer, if it was, or else its own layers."""
    for child in chain._modules.values():
        if child is None:
            continue
        if id(child) in known or not isinstance(child, nn.Sequential):
            yield child
        else:
            yield from _flat_layers(child, known)
