"""Finds who holds memory of a device that belongs neither to the model in training nor to its optimizers."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools._torch import saved_tensors_of
from lightning_memtools.memory.leaks.holder_search import LEAST_SHARE, HolderSearch, Holding, names_of_variables
from lightning_memtools.memory.leaks.holders import TensorHolder, is_a, is_ours
from lightning_memtools.memory.leaks.tensor_census import LivingTensor, TensorCensus, bytes_of, count_by_kind
from lightning_memtools.memory.living_objects import instances_of, outermost
from lightning_memtools.memory.owned import OnDevice, block_bytes, owned_by, storage_of

# A sum over 100,000 steps has about as many, and visiting them takes a second or two.
_MOST_NODES = 200_000


@dataclass(frozen=True, slots=True)
class Holdings:
    """The device memory that belongs neither to the model nor to its optimizers, in bytes.

    Attributes:
        found: What each object holds: first the user's objects, then those of this package, each group largest first.
        garbage_bytes: The bytes that garbage collection freed, because nothing held them any more.
    """

    found: tuple[Holding, ...] = ()
    garbage_bytes: int = 0


def find_holdings(
    on_device: OnDevice,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: Any,
    names: Mapping[int, str],
    *,
    is_young: Callable[[Tensor], bool] | None = None,
    seconds: float = 3.0,
) -> Holdings:
    """Find the objects that hold device memory other than that of the model, its optimizers and the batch.

    Tensors that share a storage count once. A local variable of a running user function counts as an object, too.

    Args:
        on_device: Returns whether a tensor is on the device.
        model: The model in training.
        optimizers: The optimizers of the model.
        batch: The current batch.
        names: The names of the objects of the run, by `id`.
        is_young: Returns whether a tensor was allocated during the current batch; None if this cannot be told.
        seconds: The CPU time in seconds after which the search ends.
    """
    end = time.thread_time() + seconds
    is_young = is_young or (lambda _: False)
    left_out = owned_by(model, optimizers, on_device, inputs=batch).storages
    before = {one.key: one.n_bytes for one in _settled(on_device, left_out, is_young)}
    gc.collect()
    search = _HoldingSearch(on_device, left_out, names, is_young)
    after = set(search.remaining)
    search.find_owners(optimizers, end)
    search.find_piles(end)
    search.weigh_graphs()
    search.find_piles(end)
    garbage = sum(n_bytes for key, n_bytes in before.items() if key not in after)
    weights = count_by_kind(parameter for parameter in model.parameters() if parameter.requires_grad)
    # Averaged weights, which many keep in a list of tensors, are no pile that grows.
    copy: dict[str, Any] = {"owners": {"copy of the weights": 1}, "is_of_run": True, "piles_up": False}
    return Holdings(tuple(replace(one, **copy if one.tensors == weights else {}) for one in search.joined()), garbage)


def _settled(on_device: OnDevice, left_out: Collection[int], is_young: Callable[[Tensor], bool]) -> list[LivingTensor]:
    """Return the tensors that are older than the current batch, except those whose storage id is in `left_out`."""
    return [one for one in TensorCensus(on_device).take(left_out) if not any(map(is_young, one.tensors))]


class _HoldingSearch:
    """Finds the objects that hold the tensors in `remaining`. A `Holding` sums up the tensors of one object.

    Tensors that only C++ holds go to `unheld`. A tensor's size includes what its autograd graph has saved.
    """

    def __init__(
        self,
        on_device: OnDevice,
        left_out: Collection[int],
        names: Mapping[int, str],
        is_young: Callable[[Tensor], bool],
    ) -> None:
        self._of_run, self._on_device = names, on_device
        self._search = HolderSearch(_settled(on_device, left_out, is_young), {**names_of_variables(), **names})
        self.remaining = self._search.remaining
        self._known = {*left_out, *self.remaining}
        self._least = LEAST_SHARE * bytes_of([*self.remaining.values()])
        self.unheld: dict[int, int] = {}
        self._nodes: set[Any] = set()
        self._found: list[Holding] = []

    def find_owners(self, own_optimizers: Sequence[Optimizer], end: float) -> None:
        """Find the objects that hold models and optimizers of other runs. Stop at `end`, a value of `thread_time()`."""
        own = {id(one) for one in own_optimizers}
        living = instances_of(nn.Module, Optimizer)
        modules = outermost([one for one in living if is_a(one, nn.Module)])
        optimizers = [one for one in living if is_a(one, Optimizer) and id(one) not in own]
        owners: list[nn.Module | Optimizer] = [*modules, *optimizers]
        for owner in owners:
            owned = self._owned_by(owner)
            if bytes_of(owned) <= self._least or time.thread_time() > end:
                continue
            holder = self._search.holder_of(owner, ignore=(living, modules, optimizers, owners), past_functions=True)
            kind = f"{'model' if isinstance(owner, nn.Module) else 'optimizer'} {type(owner).__name__}"
            for one in owned:
                del self.remaining[one.key]
            self._add(holder, owned, {kind: 1})

    def _owned_by(self, owner: nn.Module | Optimizer) -> list[LivingTensor]:
        module, optimizers = (nn.Module(), [owner]) if isinstance(owner, Optimizer) else (owner, [])
        storages = owned_by(module, optimizers, lambda _: True).storages
        return [self.remaining[key] for key in storages & self.remaining.keys()]

    def find_piles(self, end: float) -> None:
        """Find the objects that hold the tensors in `remaining`. Stop at `end`, a value of `time.thread_time()`."""
        for holder, pile in self._search.piles([*self.remaining.values()], lambda pile: len(pile) > 1, end=end):
            self._add(holder, pile)

    def weigh_graphs(self) -> None:
        """For each tensor in `remaining`, add to its size the bytes of tensors that its autograd graph keeps."""
        for key, one in list(self.remaining.items()):
            if n_bytes := self._take_saved_by(one.tensors):
                self.remaining[key] = replace(one, n_bytes=one.n_bytes + n_bytes)

    def _add(
        self, holder: TensorHolder | None, pile: Sequence[LivingTensor], owners: dict[str, int] | None = None
    ) -> None:
        if holder is None:
            self.unheld |= {one.key: one.n_bytes for one in pile}
            return
        holding = Holding.of(holder, pile, saved_bytes=sum(self._take_saved_by(one.tensors) for one in pile))
        piles_up, is_of_run = holding.piles_up and not owners, id(holder.root) in self._of_run
        self._found.append(replace(holding, owners=owners or {}, piles_up=piles_up, is_of_run=is_of_run))

    def _take_saved_by(self, tensors: Iterable[Tensor]) -> int:
        """Count what the autograd graphs of `tensors` have saved. Return the bytes that were not counted before."""
        total = 0
        for tensor in tensors:
            for saved in _saved_by(tensor, self._nodes):
                found = storage_of(saved)
                if found is None or not self._on_device(saved):
                    continue
                if found[0] not in self._known or self.unheld.pop(found[0], None) is not None:
                    self._known.add(found[0])
                    total += block_bytes(found[1])
        return total

    def joined(self) -> list[Holding]:
        """Return the holdings, merged by container: first the user's, then this package's, each group largest first."""
        by_path: dict[str, list[Holding]] = {}
        for one in self._found:
            by_path.setdefault(one.path, []).append(one)

        def rank(one: Holding) -> tuple[bool, int, bool]:
            # A gradient is easier to do without than the tensor that it belongs to.
            return is_ours(one.holder.root), -one.n_bytes, not one.holder.is_gradient

        return sorted(map(_joined, by_path.values()), key=rank)


def _saved_by(tensor: Tensor, seen: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a tensor's autograd graph has saved. Skip the nodes in `seen`, and add the others to it.

    Saved tensors with hooks, such as those of checkpointing, are left out: reading them would run the hooks.
    """
    waiting = [tensor.grad_fn]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from saved_tensors_of(node)
        waiting += [before for before, _ in node.next_functions]


def _joined(holdings: Sequence[Holding]) -> Holding:
    largest = max(holdings, key=lambda one: one.n_bytes)
    if len(holdings) == 1:
        return largest
    tensors: Counter[Any] = Counter()
    owners: Counter[str] = Counter()
    for one in holdings:
        tensors.update(one.tensors)
        owners.update(one.owners)
    return replace(
        largest,
        tensors=dict(tensors.most_common()),
        n_bytes=sum(one.n_bytes for one in holdings),
        with_graph=sum(one.with_graph for one in holdings),
        owners=dict(owners),
        piles_up=any(one.piles_up for one in holdings),
    )
