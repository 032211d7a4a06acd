"""Finds who holds living tensors, container by container."""

from __future__ import annotations

import gc
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_memtools.memory.error_frames import variables_of
from lightning_memtools.memory.leaks.holders import (
    GRADIENT,
    LruCache,
    ReferenceKind,
    ReferenceStep,
    TensorHolder,
    find_holder,
    first_held,
    is_a,
    names_of_modules,
)
from lightning_memtools.memory.leaks.tensor_census import LivingTensor, bytes_of, count_by_kind, largest_signatures
from lightning_memtools.memory.owned import storage_of
from lightning_memtools.memory.user_code import owner_of

# Finding a holder takes a pass over all Python objects for every link of the way to it, so it is done only for the few
# kinds of tensors that occupy the most memory.
MAX_LOOKUPS = 8
_MAX_CANDIDATES = 64
LEAST_SHARE = 0.01  # of all bytes that are searched for: smaller kinds are not worth the time
# The small tensors that Lightning's own callbacks keep, such as the scores of the best checkpoints, are no leak.
_MAX_BOOKKEEPING_BYTES = 2**20
_BOOKKEEPERS = ("lightning.", "pytorch_lightning.", "lightning_memtools.")


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors that one object holds, not counting those of the current model and its optimizers.

    Attributes:
        holder: The object.
        tensors: The number of tensors of each shape and type.
        n_bytes: The bytes that the tensors occupy on the device, including what their autograd graphs have saved.
        with_graph: The number of tensors that hold an autograd graph.
        owners: The models and optimizers of other runs, or the copy of the weights, that the object holds, counted by
            name: {"model Net": 3}.
        piles_up: True if it looks as if the object collects more and more tensors.
        is_of_run: True if the object belongs to the run: the model, its callbacks or its Trainer.
    """

    holder: TensorHolder
    tensors: Mapping[tuple[tuple[int, ...], str], int]
    n_bytes: int = 0
    with_graph: int = 0
    owners: dict[str, int] = field(default_factory=dict)
    piles_up: bool = False
    is_of_run: bool = True

    @classmethod
    def of(cls, holder: TensorHolder, pile: Sequence[LivingTensor], *, saved_bytes: int = 0) -> Holding:
        """Summarize the tensors `pile` that one object holds. Their autograd graphs keep another `saved_bytes`."""
        kinds, with_graph = count_by_kind(one.tensors[0] for one in pile), sum(one.has_graph for one in pile)
        is_pile = with_graph > 0 or (len(pile) > 1 and any(step.is_element for step in holder.steps))
        piles_up = is_pile and not is_expected(holder, pile)
        return cls(holder, kinds, bytes_of(pile) + saved_bytes, with_graph, piles_up=piles_up)

    @property
    def is_left_over(self) -> bool:
        """True if the tensors belong to a model or optimizer of an earlier run, which some object still holds."""
        return bool(self.owners) and not self.is_of_run

    @property
    def path(self) -> str:
        """The expression for the container of the tensors, or for a single tensor, such as "MyModel.outs"."""
        holder = self.holder
        grad = f"[...].{GRADIENT}" if holder.container_path != holder.path and holder.is_gradient else ""
        return f"{holder.container_path}{grad}{holder.place}"


class HolderSearch:
    """Finds the objects that hold tensors. Once a tensor's holder is known, the tensor is removed from `remaining`.

    Args:
        living: The tensors whose holders are to be found.
        names: The names of known objects, such as the model and its modules, by the `id` of the object.

    Attributes:
        remaining: The tensors whose holder is not known yet, by the ids of their storages.
    """

    def __init__(self, living: Iterable[LivingTensor], names: Mapping[int, str]) -> None:
        self.remaining = {one.key: one for one in living}
        self._names = names

    def piles(
        self, among: Sequence[LivingTensor], is_pile: Callable[[list[LivingTensor]], bool], *, end: float = math.inf
    ) -> Iterator[tuple[TensorHolder | None, list[LivingTensor]]]:
        """Yield pairs: an object that holds tensors, and these tensors. The largest groups of tensors come first.

        The holder is None for tensors that no Python object holds. The yielded tensors are removed from `remaining`.

        Args:
            among: The tensors to search for. Other tensors in the same container are yielded too.
            is_pile: Called with the tensors that one function holds; returns whether there are enough to name the
                function. If not, the object that holds the function is yielded: it may hold many such functions.
            end: The value of `time.thread_time()` at which the search ends.
        """
        least = LEAST_SHARE * bytes_of(among)
        for signature in largest_signatures(among):
            for _ in range(MAX_LOOKUPS):
                left = [one for one in among if one.signature == signature and one.key in self.remaining]
                if bytes_of(left) <= least or time.thread_time() > end:
                    break
                yield self._take_pile(left[-_MAX_CANDIDATES:], is_pile)

    def _take_pile(
        self, tried: Sequence[LivingTensor], is_pile: Callable[[list[LivingTensor]], bool]
    ) -> tuple[TensorHolder | None, list[LivingTensor]]:
        candidates = [tensor for one in tried for tensor in one.tensors]
        ignore = (candidates, *(own for one in self.remaining.values() for own in (one.tensors, one.owners)))
        held = next((one for one in candidates if id(one) in self._names), None)
        held = first_held(candidates, ignore=ignore) if held is None else held
        if held is not None:
            holder = self.holder_of(held, ignore=ignore)
            is_function = holder is not None and is_a(holder.root, (FunctionType, GeneratorType))
            if is_function and not is_pile(self._in_place_of(holder, held)):
                holder = self.holder_of(held, ignore=ignore, past_functions=True)
        elif (owner := next((owner for one in tried for owner in one.owners), None)) is not None:
            held, holder = owner.grad, self.holder_of(owner, ignore=ignore)
            if holder is not None:
                steps = (*holder.steps, ReferenceStep(ReferenceKind.ATTRIBUTE, GRADIENT))
                holder = replace(holder, steps=steps, links=(*holder.links, owner))
        else:
            holder = None
        pile = [*tried] if held is None else self._in_place_of(holder, held)
        for one in pile:
            del self.remaining[one.key]
        return holder, pile

    def holder_of(self, held: Any, *, ignore: Sequence[Any], past_functions: bool = False) -> TensorHolder | None:
        """Return the holder of `held` (see `find_holder`). If the name of `held` is known, `held` is its own holder."""
        if id(held) in self._names:
            return TensorHolder(held, self._names[id(held)], (), ())
        return find_holder(held, self._names, ignore=ignore, past_functions=past_functions)

    def _in_place_of(self, holder: TensorHolder | None, held: Any) -> list[LivingTensor]:
        """Return the tensors in `remaining` that share a container with the tensor `held`, including `held` itself."""
        there = [held] if holder is None else [held, *holder.holds()]
        found = (storage_of(one) for one in there if is_a(one, Tensor))
        keys = dict.fromkeys(one[0] for one in found if one is not None)
        return [self.remaining[key] for key in keys if key in self.remaining]


def is_expected(holder: TensorHolder, pile: Sequence[LivingTensor]) -> bool:
    """Return True if the tensors `pile` are no leak: few bytes that Lightning keeps, or a container of limited size."""
    owner = type(holder.root).__module__
    bookkeeping = owner.startswith(_BOOKKEEPERS) and bytes_of(pile) <= _MAX_BOOKKEEPING_BYTES
    return bookkeeping or any(_has_limit(link) for link in holder.links)


def _has_limit(container: Any) -> bool:
    if is_a(container, deque):
        return container.maxlen is not None
    return is_a(container, LruCache) and container.cache_parameters()["maxsize"] is not None


def names_of_run(model: nn.Module, others: Iterable[Any]) -> dict[int, str]:
    """Return the names of a model, its modules and the other objects of a run, by the `id` of each object."""
    return {id(one): type(one).__name__ for one in others if one is not None} | names_of_modules(model)


def names_of_variables() -> dict[int, str]:
    """Return the names of the local variables of the user's running functions, by the `id` of their values."""
    names: dict[int, str] = {}
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if owner_of(code.co_filename) == "user" and code.co_name != "<module>":
            place = f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
            for name, value in variables_of(frame).items():
                if is_a(value, Tensor) or (gc.is_tracked(value) and not is_a(value, (type, ModuleType, FunctionType))):
                    names.setdefault(id(value), f"{name} in {place}")
        frame = frame.f_back
    return names
