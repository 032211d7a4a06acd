"""Finds who holds what lies on a device and belongs neither to the model in training nor to its optimizers."""

from __future__ import annotations

import gc
import inspect
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memtools.memory.error_frames import variables_of
from lightning_memtools.memory.leaks.growing_graphs import tensors_saved_by
from lightning_memtools.memory.leaks.holders import (
    TensorHolder,
    arrays_over,
    find_holder,
    first_held,
    is_a,
    tensor_behind,
)
from lightning_memtools.memory.leaks.leak_detector import (
    MAX_CANDIDATES,
    MAX_LOOKUPS,
    LivingTensor,
    SearchScope,
    TensorCensus,
    all_tensors,
    bytes_of,
    count_by_kind,
    is_expected,
    largest_signatures,
)
from lightning_memtools.memory.leaks.leak_report import LeakFinding
from lightning_memtools.memory.living_objects import instances_of, outermost
from lightning_memtools.memory.owned import OnDevice, block_bytes, owned_by, storage_of
from lightning_memtools.memory.user_code import owner_of

# Smaller shares of what nobody owns are not worth the time of a search.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors that one object holds, and that belong neither to the model in training nor to its optimizers.

    Attributes:
        finding: The holder, with the number of tensors of each kind and their bytes.
        owners: The number of models and optimizers of other runs among what it holds, by name: {"model Net": 3}.
        piles_up: True if several tensors are in a container without a limit of its own, or carry autograd graphs.
        is_of_run: True if the model, its callbacks or its Trainer hold it.
        made_at: Where the largest of the tensors was made, such as "at train.py:31"; "" where it is not known.
    """

    finding: LeakFinding
    owners: dict[str, int] = field(default_factory=dict)
    piles_up: bool = False
    is_of_run: bool = True
    made_at: str = ""

    @property
    def n_bytes(self) -> int:
        """The bytes that are held."""
        return self.finding.n_bytes

    @property
    def is_left_over(self) -> bool:
        """True if a model or optimizer is held that does not belong to the run."""
        return bool(self.owners) and not self.is_of_run

    @property
    def path(self) -> str:
        """The expression for the container, or for the tensor itself: "MyModel.outs"."""
        holder = self.finding.holder
        return "" if holder is None else f"{holder.container_path}{holder.place}"


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that was found on a device beside what the model and its optimizers own. Sizes in bytes.

    Attributes:
        found: Who holds it, the largest first.
        garbage_bytes: Bytes that a collection of garbage freed: nobody held them any more.
        unheld_bytes: Bytes of tensors that no Python object holds, and of those that there was no time to look for.
    """

    found: tuple[Holding, ...] = ()
    garbage_bytes: int = 0
    unheld_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockNotes:
    """The notes of a recording on a tensor's block, where there is a recording.

    Attributes:
        is_young: Returns True if the tensor was allocated since the present batch began.
        made_at: Returns where the tensor was made, such as "at train.py:31"; "" where it is not known.
    """

    is_young: Callable[[Tensor], bool] = lambda _: False
    made_at: Callable[[Tensor], str] = lambda _: ""


def find_holdings(
    on_device: OnDevice,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: Any,
    scope: SearchScope,
    *,
    notes: BlockNotes | None = None,
    seconds: float = 3.0,
) -> Holdings:
    """Find who holds what lies on a device beside the model, its optimizers and its batch.

    Tensors are counted once each, with all that shares their storage. What running functions of the user's hold counts
    too, and is found by the variable's name.

    Args:
        on_device: Tells which tensors count.
        model: The model in training.
        optimizers: Its optimizers.
        batch: Its batch.
        scope: The objects of the run, with their names.
        notes: The notes of a recording.
        seconds: The processor time after which no further holder is looked for.
    """
    end = time.thread_time() + seconds
    notes = notes or BlockNotes()
    left_out = owned_by(model, optimizers, on_device, inputs=batch).storages
    before = dict(_bytes_by_storage(on_device, left_out, notes))
    gc.collect()
    search = _HoldingSearch(on_device, left_out, scope, notes)
    after = set(search.remaining)
    search.find_owners(optimizers, end)
    search.find_piles(end)
    search.weigh_graphs()
    search.find_piles(end)
    unheld = sum(one.n_bytes for one in search.remaining.values()) + sum(search.unheld.values())
    garbage = sum(n_bytes for key, n_bytes in before.items() if key not in after)
    return Holdings(tuple(search.joined()), garbage, unheld)


def _bytes_by_storage(on_device: OnDevice, left_out: Collection[int], notes: BlockNotes) -> Iterator[tuple[int, int]]:
    for one in TensorCensus(on_device).take(left_out):
        found = storage_of(one.tensor)
        if found is not None and not notes.is_young(one.tensor):
            yield found[0], one.n_bytes


class _HoldingSearch:
    """Takes tensors out of `remaining`, by storage, and puts what holds them into `_found`.

    Those that only C++ holds go to `unheld`. They may be part of a graph, and are then counted with its tensor.
    """

    def __init__(self, on_device: OnDevice, left_out: Collection[int], scope: SearchScope, notes: BlockNotes) -> None:
        self._scope, self._notes, self._on_device = scope, notes, on_device
        self._names = _names_of_variables() | scope.names
        self.remaining: dict[int, LivingTensor] = {}
        for one in TensorCensus(on_device).take(left_out):
            found = storage_of(one.tensor)
            if found is not None and not notes.is_young(one.tensor):
                self.remaining[found[0]] = one
        # Of tensors that share a storage, Python may hold any.
        self._sharing: dict[int, list[Tensor]] = {}
        for tensor in all_tensors():
            if on_device(tensor) and (found := storage_of(tensor)) is not None and found[0] in self.remaining:
                self._sharing.setdefault(found[0], []).append(tensor)
        self._known = {*left_out, *self.remaining}
        self._least = _LEAST_SHARE * sum(one.n_bytes for one in self.remaining.values())
        self.unheld: dict[int, int] = {}
        self._nodes: set[Any] = set()
        self._found: list[Holding] = []

    def find_owners(self, own_optimizers: Sequence[Optimizer], end: float) -> None:
        """Find who holds models and optimizers that are not those of the run."""
        own = {id(one) for one in own_optimizers}
        living = instances_of(nn.Module, Optimizer)
        modules = outermost([one for one in living if is_a(one, nn.Module)])
        optimizers = [one for one in living if is_a(one, Optimizer) and id(one) not in own]
        owners: list[nn.Module | Optimizer] = [*modules, *optimizers]
        for owner in owners:
            owned = self._owned_by(owner)
            if bytes_of(owned) <= self._least or time.thread_time() > end:
                continue
            ignore = (living, modules, optimizers, owners, owned, self._found)
            holder = self._named(owner) or find_holder(owner, self._names, ignore=ignore, past_functions=True)
            kind = f"{'model' if isinstance(owner, nn.Module) else 'optimizer'} {type(owner).__name__}"
            self._add(holder, owned, {kind: 1})

    def _owned_by(self, owner: nn.Module | Optimizer) -> list[LivingTensor]:
        if isinstance(owner, Optimizer):
            storages = owned_by(nn.Module(), [owner], lambda _: True).storages
        else:
            storages = owned_by(owner, (), lambda _: True).storages
        return [self.remaining[key] for key in storages & self.remaining.keys()]

    def find_piles(self, end: float) -> None:
        """Find who holds the rest, the kinds of tensors with the most bytes first."""
        for signature in largest_signatures(self.remaining.values()):
            for _ in range(MAX_LOOKUPS):
                keys = [key for key, one in self.remaining.items() if one.signature == signature]
                if sum(self.remaining[key].n_bytes for key in keys) <= self._least or time.thread_time() > end:
                    break
                tensors = [one for key in keys[-MAX_CANDIDATES:] for one in self._sharing.get(key, ())]
                tensor, holder = self._holder_of_one(tensors)
                if tensor is None or holder is None:
                    # More may be held by others, but not among those tried.
                    for key in keys[-MAX_CANDIDATES:]:
                        self.unheld[key] = self.remaining.pop(key).n_bytes
                    continue
                self._add(holder, self._in_place_of(holder, tensor))

    def weigh_graphs(self) -> None:
        """Count what graphs have saved with the remaining tensors, which may be tiny themselves."""
        for key, one in list(self.remaining.items()):
            if n_bytes := self._take_saved_by(self._sharing.get(key, ())):
                self.remaining[key] = replace(one, n_bytes=one.n_bytes + n_bytes)
        self._least = _LEAST_SHARE * sum(one.n_bytes for one in self.remaining.values())

    def _holder_of_one(self, tensors: list[Tensor]) -> tuple[Tensor | None, TensorHolder | None]:
        named = next((one for one in tensors if id(one) in self._names), None)
        if named is not None:
            return named, self._named(named)
        mine = self._own_containers()
        tensor = first_held(tensors, ignore=mine)
        if tensor is None:
            arrays = arrays_over(tensors)
            tensor = next((one for one in tensors if id(one) in arrays), None)
            if tensor is None:
                return None, None
            return tensor, find_holder(arrays[id(tensor)], self._names, ignore=(arrays, *mine), past_functions=True)
        ignore = (tensors, *mine)
        holder = find_holder(tensor, self._names, ignore=ignore)
        is_function = holder is not None and is_a(holder.root, (FunctionType, GeneratorType))
        if is_function and len(self._in_place_of(holder, tensor)) == 1:
            # Each of many functions may hold one: then what holds these functions is of interest.
            holder = None  # it refers to what is searched for
            holder = find_holder(tensor, self._names, ignore=ignore, past_functions=True)
        return tensor, holder

    def _named(self, one: Any) -> TensorHolder | None:
        name = self._names.get(id(one))
        return None if name is None else TensorHolder(one, name, (), ())

    def _own_containers(self) -> tuple[Any, ...]:
        return (self._found, self._sharing, self.remaining, *self._sharing.values(), *self.remaining.values())

    def _in_place_of(self, holder: TensorHolder | None, tensor: Tensor) -> list[LivingTensor]:
        """Return the remaining tensors that are held for the same reason as this one, itself among them."""
        held = [tensor] if holder is None else [*map(tensor_behind, holder.holds()), tensor]
        found = (storage_of(one) for one in held if is_a(one, Tensor))
        keys = dict.fromkeys(one[0] for one in found if one is not None)
        return [self.remaining[key] for key in keys if key in self.remaining]

    def _add(
        self, holder: TensorHolder | None, pile: Sequence[LivingTensor], owners: dict[str, int] | None = None
    ) -> None:
        keys = [found[0] for one in pile if (found := storage_of(one.tensor)) is not None]
        for key in keys:
            self.remaining.pop(key, None)
        if holder is None:
            self.unheld |= {key: one.n_bytes for key, one in zip(keys, pile, strict=True)}
            return
        # Of tensors that share a storage, one may have been detached from the graph of another.
        shared = [self._sharing.get(key, []) for key in keys]
        with_graph = sum(any(one.grad_fn is not None for one in those) for those in shared)
        n_bytes = bytes_of(pile) + sum(self._take_saved_by(those) for those in shared if with_graph)
        is_pile = with_graph > 0 or (len(pile) > 1 and any(step.is_element for step in holder.steps))
        largest = max(pile, key=lambda one: one.n_bytes)
        self._found.append(
            Holding(
                LeakFinding(holder, count_by_kind(one.tensor for one in pile), n_bytes, with_graph),
                owners or {},
                piles_up=is_pile and not owners and not is_expected(holder, pile),
                is_of_run=id(holder.root) in self._scope.names,
                made_at=self._notes.made_at(largest.tensor),
            )
        )

    def _take_saved_by(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes that the graphs of tensors have saved, where nothing in Python was found to hold them."""
        total = 0
        for tensor in tensors:
            for saved in tensors_saved_by(tensor, self._nodes):
                found = storage_of(saved)
                if found is None or not self._on_device(saved):
                    continue
                if found[0] not in self._known or self.unheld.pop(found[0], None) is not None:
                    self._known.add(found[0])
                    total += block_bytes(found[1])
        return total

    def joined(self) -> list[Holding]:
        """Return one holding for each container, the largest first."""
        by_path: dict[str, list[Holding]] = {}
        for one in self._found:
            by_path.setdefault(one.path, []).append(one)
        return sorted(map(_joined, by_path.values()), key=lambda one: -one.n_bytes)


def _joined(holdings: Sequence[Holding]) -> Holding:
    largest = max(holdings, key=lambda one: one.n_bytes)
    if len(holdings) == 1:
        return largest
    tensors: Counter[Any] = Counter()
    owners: Counter[str] = Counter()
    for one in holdings:
        tensors.update(one.finding.tensors)
        owners.update(one.owners)
    finding = LeakFinding(
        largest.finding.holder,
        dict(tensors.most_common()),
        sum(one.n_bytes for one in holdings),
        sum(one.finding.with_graph for one in holdings),
    )
    piles_up = any(one.piles_up for one in holdings)
    return replace(largest, finding=finding, owners=dict(owners), piles_up=piles_up)


def _names_of_variables() -> dict[int, str]:
    """Return names for what the local variables of the user's running functions refer to, by identity."""
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
