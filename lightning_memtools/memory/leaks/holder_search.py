"""Finds who holds living tensors, place by place."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, GeneratorType
from typing import Any

from torch import Tensor

from lightning_memtools.memory.leaks.holders import TensorHolder, find_holder, first_held, is_a
from lightning_memtools.memory.leaks.leak_report import LeakFinding
from lightning_memtools.memory.leaks.tensor_census import LivingTensor, bytes_of, count_by_kind
from lightning_memtools.memory.owned import storage_of

# Finding one holder takes a pass over all Python objects for every link of the way to it, so it is done only for the
# few kinds of tensors that occupy the most memory.
MAX_LOOKUPS = 8
MAX_CANDIDATES = 64
# The small tensors that Lightning's own callbacks keep, such as the scores of the best checkpoints, are no leak.
MAX_BOOKKEEPING_BYTES = 2**20
_LruCache = type(functools.lru_cache(lambda: None))
_BOOKKEEPERS = ("lightning.", "pytorch_lightning.", "lightning_memtools.")


class HolderSearch:
    """Finds who holds tensors, and takes those that were found out of `remaining`.

    Args:
        living: The tensors.
        names: The names of known objects by identity.

    Attributes:
        remaining: The tensors whose holder is not known yet, by the identities of their storages.
    """

    def __init__(self, living: Iterable[LivingTensor], names: Mapping[int, str]) -> None:
        self.remaining = {one.key: one for one in living}
        self._names = names

    def take_pile(
        self, keys: Sequence[int], is_pile: Callable[[list[LivingTensor]], bool]
    ) -> tuple[TensorHolder | None, list[LivingTensor]] | None:
        """Find who holds one of these tensors, and take all that it holds in the same place.

        Args:
            keys: The remaining tensors to choose from. Only the last 64 are tried.
            is_pile: Returns whether the tensors that a function or generator holds are many enough to name it.
                Otherwise what holds the function is named, since each of many functions may hold one.

        Returns:
            The holder, None if it has no name, and the tensors; None if Python holds none of those that were tried.
        """
        tried = [tensor for key in keys[-MAX_CANDIDATES:] for tensor in self.remaining[key].tensors]
        ignore = (tried, *(one.tensors for one in self.remaining.values()))
        held = next((one for one in tried if id(one) in self._names), None)
        if held is None and (held := first_held(tried, ignore=ignore)) is None:
            return None
        holder = self.holder_of(held, ignore=ignore)
        is_function = holder is not None and is_a(holder.root, (FunctionType, GeneratorType))
        if is_function and not is_pile(self._in_place_of(holder, held)):
            holder = None  # it refers to what is searched for
            holder = self.holder_of(held, ignore=ignore, past_functions=True)
        pile = self._in_place_of(holder, held)
        for one in pile:
            del self.remaining[one.key]
        return holder, pile

    def holder_of(self, held: Any, *, ignore: Sequence[Any], past_functions: bool = False) -> TensorHolder | None:
        """Return the holder of an object, which is the object itself if it has a name; see `find_holder`."""
        if id(held) in self._names:
            return TensorHolder(held, self._names[id(held)], (), ())
        return find_holder(held, self._names, ignore=ignore, past_functions=past_functions)

    def _in_place_of(self, holder: TensorHolder | None, held: Tensor) -> list[LivingTensor]:
        """Return the remaining tensors that are held for the same reason as this one, itself among them."""
        there = [held] if holder is None else [held, *holder.holds()]
        found = (storage_of(one) for one in there if is_a(one, Tensor))
        keys = dict.fromkeys(one[0] for one in found if one is not None)
        return [self.remaining[key] for key in keys if key in self.remaining]


def is_expected(holder: TensorHolder | None, pile: Sequence[LivingTensor]) -> bool:
    """Return whether growth in a place is expected: it has a limit, or it is bookkeeping of Lightning."""
    if holder is None:
        return False
    owner = type(holder.root).__module__
    bookkeeping = owner.startswith(_BOOKKEEPERS) and bytes_of(pile) <= MAX_BOOKKEEPING_BYTES
    return bookkeeping or any(_has_limit(link) for link in holder.links)


def _has_limit(container: Any) -> bool:
    if is_a(container, deque):
        return container.maxlen is not None
    return is_a(container, _LruCache) and container.cache_parameters()["maxsize"] is not None


def finding_of(holder: TensorHolder | None, pile: Sequence[LivingTensor], *, saved_bytes: int = 0) -> LeakFinding:
    """Return the finding of a pile, with the bytes that its graphs have saved."""
    kinds = count_by_kind(one.tensors[0] for one in pile)
    return LeakFinding(holder, kinds, bytes_of(pile) + saved_bytes, sum(one.has_graph for one in pile))
