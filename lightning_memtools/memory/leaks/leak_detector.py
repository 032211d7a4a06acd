"""Detects leaks: watches the memory that stays allocated, and finds the tensors that pile up."""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn import Parameter

from lightning_memtools.memory.leaks.growing_graphs import graph_clock, spans, tensors_with_graph
from lightning_memtools.memory.leaks.holders import (
    TensorHolder,
    arrays_over,
    find_holder,
    first_held,
    is_a,
    names_of_modules,
    tensor_behind,
)
from lightning_memtools.memory.leaks.leak_report import LeakFinding, LeakReport
from lightning_memtools.memory.owned import OnDevice, Owned, block_bytes, storage_of

# Finding one holder takes a pass over all Python objects for every link of the way to it, so it is done only for the
# few kinds of tensors that occupy the most memory.
MAX_LOOKUPS = 8
MAX_CANDIDATES = 64
_MIN_SHARE = 0.01
# The approximate time of a census for each block of memory that Python has allocated: 0.1 s with 19 million.
CENSUS_SECONDS_PER_BLOCK = 1e-8
# A census that takes longer is left out as long as the growth may still end by itself.
QUICK_CENSUS_S = 0.05
# Readings of growth after which even what fits is reported: a cache may fill for ten epochs.
_LONGEST_WAIT = 12
# The small tensors that Lightning's own callbacks keep, such as the scores of the best checkpoints, are no leak.
_MAX_BOOKKEEPING_BYTES = 2**20
_LruCache = type(functools.lru_cache(lambda: None))
_BOOKKEEPERS = ("lightning.", "pytorch_lightning.", "lightning_memtools.")


@dataclass(frozen=True, slots=True)
class LivingTensor:
    """A tensor that lives on the device.

    Attributes:
        tensor: The tensor; one of those that share a storage.
        n_bytes: The memory that its storage occupies.
        born: The number of the census that saw it first.
    """

    tensor: Tensor
    n_bytes: int
    born: int

    @property
    def signature(self) -> tuple[torch.Size, torch.dtype]:
        """The shape and type, which tensors of the same origin share."""
        return self.tensor.shape, self.tensor.dtype


class TensorCensus:
    """Counts the living tensors on demand, and remembers when each was first seen, without keeping any alive.

    A census visits all objects that Python's garbage collector tracks, which takes 20 to 100 ms per million.
    """

    def __init__(self, on_device: OnDevice) -> None:
        self._on_device = on_device
        self._births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self.number = 0

    def take(self, leave_out: Collection[int] = ()) -> list[LivingTensor]:
        """Return the tensors that are on the device now, without those whose storages (`storage_of`) are left out."""
        self.number += 1
        seen = set(leave_out)
        survivors: list[LivingTensor] = []
        births: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        for tensor in all_tensors():
            if not self._on_device(tensor):
                continue
            found = storage_of(tensor)
            if found is None or found[0] in seen or found[1].nbytes() == 0:
                continue
            key, storage = found
            seen.add(key)
            reference, born = self._births.get(key, (None, 0))
            if reference is None or reference() is not storage:  # the address belonged to one that was freed
                # The reference is to the storage: torch.utils.swap_tensors refuses tensors with weak references.
                reference, born = weakref.ref(storage), self.number
            births[key] = reference, born
            survivors.append(LivingTensor(tensor, block_bytes(storage), born))
        self._births = births
        return survivors

    def restart(self) -> None:
        """Forget all births."""
        self._births.clear()
        self.number = 0


@dataclass(slots=True)
class SearchScope:
    """The objects among which holders are searched for, with their names.

    Attributes:
        roots: Objects whose attributes are searched for graphs: the model, callbacks, the data module.
        names: The names of all objects that have one, by identity.
        stop_at: Objects that are not searched.
    """

    roots: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    stop_at: list[Any] = field(default_factory=list)

    @classmethod
    def around(cls, model: nn.Module, others: Iterable[Any], stop_at: Any) -> SearchScope:
        """Return the scope that consists of a model, what else belongs to the user, and a named object to stop at."""
        others = [other for other in others if other is not None]
        names = {id(other): type(other).__name__ for other in (*others, stop_at)}
        return cls([model, *others], names | names_of_modules(model), [stop_at])


class LeakDetector:
    """Reports what grows in `warn_after` readings in a row. These rules keep it silent in healthy runs.

    * What the model and its optimizers own does not count, whenever it is allocated.
    * Tensors count if some from each of these intervals are still there, in the same place. So nothing that is replaced
      is reported, whatever its size: the last batch, the last outputs, running means.
    * A single tensor that is replaced by a larger one counts only after twice as many readings, and if it makes up half
      of the growth: sizes that vary by chance sometimes rise three times in a row too.
    * A graph counts if it has nodes from each interval.
    * Where a census is slow, the first ones are left out, because most growth ends by itself. It is then unknown when
      the tensors of the first census were allocated. They count if they are at least as large as the latest interval's
      tensors times the number of intervals; otherwise they are checked again after enough censuses.
    * Where no holder is found, tensors of one shape and type count after twice as many readings, if some from each
      interval are still there.
    * What is in a container with a limit of its own (`deque(maxlen=...)`, `lru_cache(maxsize=...)`) never counts.
    * Tensors that pile up and may wait count after twelve readings: a cache that fills in ten epochs has stopped then.

    Args:
        on_device: Tells which tensors count.
        warn_after: The number of readings in a row.
        find_scope: Called when a holder has to be found.
        may_wait: Returns whether growth by so many bytes in each reading can wait for the next one.
    """

    def __init__(
        self,
        on_device: OnDevice,
        *,
        warn_after: int,
        find_scope: Callable[[], SearchScope] = SearchScope,
        may_wait: Callable[[float], bool] = lambda _bytes_per_reading: False,
    ) -> None:
        self._warn_after = warn_after
        self._find_scope = find_scope
        self._may_wait = may_wait
        self._census = TensorCensus(on_device)
        self._levels: list[int] = []
        self._next_look = warn_after
        # Readings of `graph_clock`.
        self._clocks: deque[int] = deque(maxlen=warn_after + 1)
        self.has_reported = False

    def read(
        self, unaccounted_bytes: int, owned: Owned, *, collect: Callable[[], int] | None = None
    ) -> LeakReport | None:
        """Take one reading of the memory. Call it at the same point of every epoch; the first is the baseline.

        Args:
            unaccounted_bytes: The allocated memory without what is owned.
            owned: The memory that the model and its optimizers own.
            collect: Collects garbage and returns the first figure again; it is called before anything is reported.

        Returns:
            The report of a leak, once; otherwise None.
        """
        if self.has_reported:
            return None
        self._clocks.append(graph_clock())
        findings = self._growing_graphs()
        if self._has_grown(unaccounted_bytes, collect):
            findings += self._find_growing_tensors(owned)
        if not findings:
            return None
        self.has_reported = True
        self._census.restart()
        in_a_row = max(self._warn_after, len(self._levels) - 1)
        return LeakReport(in_a_row, self._levels[-1] - self._levels[0], findings)

    def _has_grown(self, unaccounted_bytes: int, collect: Callable[[], int] | None) -> bool:
        """Return whether memory grew since the last reading; if it did not, start again from this reading."""
        if self._levels and unaccounted_bytes > self._levels[-1]:
            n_growths = len(self._levels)
            mean = (unaccounted_bytes - self._levels[0]) / n_growths
            if n_growths == self._next_look < _LONGEST_WAIT and self._may_wait(mean):
                self._next_look += 1
            if collect is not None and n_growths == self._next_look:  # a report may follow
                unaccounted_bytes = collect()
            if unaccounted_bytes > self._levels[-1]:
                self._levels.append(unaccounted_bytes)
                return True
        self._levels = [unaccounted_bytes]
        self._next_look = self._warn_after
        self._census.restart()
        return False

    def _find_growing_tensors(self, owned: Owned) -> list[LeakFinding]:
        """Take a census, and once growth has gone on for long enough, find the tensors that pile up."""
        n_growths = len(self._levels) - 1
        # If the wait for the next look is longer, only the last readings matter.
        if n_growths <= self._next_look - self._warn_after:
            return []
        if self._census.number == 0 and n_growths < self._next_look - 1 and _census_is_slow():
            return []
        survivors = self._census.take(owned.storages)
        if n_growths < self._next_look:
            return []
        n_missing = max(0, self._warn_after - self._census.number)
        self._next_look += n_missing or self._next_look
        return self._piles(survivors)

    def _growing_graphs(self) -> list[LeakFinding]:
        if len(self._clocks) <= self._warn_after:
            return []
        scope = self._find_scope()
        findings = []
        clocks = tuple(self._clocks)
        growing = [t for t in tensors_with_graph(scope.roots, stop_at=scope.stop_at) if spans(t, clocks)]
        for tensor in growing[:MAX_LOOKUPS]:
            holder = find_holder(tensor, scope.names, ignore=(growing,))
            findings.append(LeakFinding(holder, count_by_kind([tensor]), 0, 1, graph_grows=True))
        return findings

    def _piles(self, survivors: list[LivingTensor]) -> list[LeakFinding]:
        """Return the places where tensors piled up since growth began."""
        names = self._find_scope().names
        remaining = {id(survivor.tensor): survivor for survivor in survivors}
        findings: list[LeakFinding] = []
        unplaced: list[LivingTensor] = []
        newest = [survivor for survivor in survivors if survivor.born == self._census.number]
        lookups = 0
        for signature in largest_signatures(newest):
            # Every lookup takes many passes over all objects: it is not done for what is tiny beside a leak.
            if findings and bytes_of([s for s in newest if s.signature == signature]) < _MIN_SHARE * bytes_of(newest):
                break
            while lookups < MAX_LOOKUPS:
                young = [s.tensor for s in newest if id(s.tensor) in remaining and s.signature == signature]
                lookups += bool(young)
                tensor, holder = self._holder_of_one(young[-MAX_CANDIDATES:], names, (young, *survivors), remaining)
                if tensor is None:  # all were found in another place already, or only a graph holds them
                    break
                pile = _same_place(holder, remaining) or [remaining[id(tensor)]]
                for survivor in pile:
                    del remaining[id(survivor.tensor)]
                if is_expected(holder, pile):
                    continue
                if self._is_growing(pile):
                    findings.append(_finding(holder, pile))
                else:
                    unplaced += pile
        if not findings:
            findings = self._without_holders([*remaining.values(), *unplaced])
        return sorted(findings, key=lambda finding: -finding.n_bytes)

    def _holder_of_one(
        self,
        young: list[Tensor],
        names: Mapping[int, str],
        ignore: tuple[Any, ...],
        remaining: Mapping[int, LivingTensor],
    ) -> tuple[Tensor | None, TensorHolder | None]:
        """Return one of the tensors that Python holds, with its holder."""
        tensor = first_held(young, ignore=ignore)
        if tensor is not None:
            holder = find_holder(tensor, names, ignore=ignore)
            is_function = holder is not None and is_a(holder.root, (FunctionType, GeneratorType))
            if is_function and not self._is_growing(_same_place(holder, remaining)):
                # Each of many functions may hold one: then what holds these functions is of interest.
                holder = None  # it refers to what is searched for
                holder = find_holder(tensor, names, ignore=ignore, past_functions=True)
            return tensor, holder
        arrays = arrays_over(young)
        tensor = next((one for one in young if id(one) in arrays), None)
        if tensor is None:
            return None, None
        return tensor, find_holder(arrays[id(tensor)], names, ignore=(arrays, *ignore), past_functions=True)

    def _without_holders(self, survivors: list[LivingTensor]) -> list[LeakFinding]:
        """Return the kinds of tensors that grew for twice as long as usual in places that nobody knows."""
        if len(self._levels) <= 2 * self._warn_after:
            return []
        findings = []
        for signature in largest_signatures(survivors):
            pile = [survivor for survivor in survivors if survivor.signature == signature]
            # Where the holder is not known, it may be Lightning's bookkeeping too.
            is_much = bytes_of(pile) > _MAX_BOOKKEEPING_BYTES and len(pile) > self._warn_after
            if is_much and self._is_growing(pile):
                findings.append(_finding(None, pile))
        return findings

    def _is_growing(self, pile: list[LivingTensor]) -> bool:
        latest = self._census.number
        n_missing = max(0, self._warn_after - latest)
        born: Counter[int] = Counter()
        for survivor in pile:
            born[survivor.born] += survivor.n_bytes
        ever_since = range(latest - self._warn_after + n_missing + 1, latest + 1)
        if all(born[number] for number in ever_since) and (
            not n_missing or born[ever_since[0]] >= (n_missing + 1) * born[latest]
        ):
            return True
        grown_bytes = self._levels[-1] - self._levels[0]
        return len(self._levels) > 2 * self._warn_after and 2 * bytes_of(pile) >= grown_bytes


def all_tensors() -> list[Tensor]:
    """Return all tensors that Python has an object of."""
    # The referrers of a class are its instances and a few others. Finding them takes a third of the time of looking at
    # all objects in Python. Types are compared exactly: isinstance would run code of proxies and mocks.
    kinds = {kind for kind in _with_subclasses(Tensor) if _has_storage(kind)}
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _has_storage(kind: type) -> bool:
    # Torch's other subclasses wrap tensors, which are found by themselves; every further class costs time.
    return not kind.__module__.startswith("torch.") or issubclass(kind, Parameter)


def blocks_to_walk() -> int:
    """Return about how many blocks of memory belong to objects that Python's garbage collector visits.

    This measures the time of a pass over all objects without taking one. Objects that `gc.freeze` has hidden are not
    visited; with torch and Lightning imported, an object takes about four blocks.
    """
    return max(0, sys.getallocatedblocks() - 4 * gc.get_freeze_count())


def _census_is_slow() -> bool:
    return CENSUS_SECONDS_PER_BLOCK * blocks_to_walk() > QUICK_CENSUS_S


def largest_signatures(survivors: Iterable[LivingTensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the signatures with the most bytes, the largest first."""
    sizes: Counter[tuple[torch.Size, torch.dtype]] = Counter()
    for survivor in survivors:
        sizes[survivor.signature] += survivor.n_bytes
    return [signature for signature, _ in sizes.most_common(MAX_LOOKUPS)]


def _finding(holder: TensorHolder | None, pile: Sequence[LivingTensor]) -> LeakFinding:
    tensors = [survivor.tensor for survivor in pile]
    with_graph = sum(tensor.grad_fn is not None for tensor in tensors)
    return LeakFinding(holder, count_by_kind(tensors), bytes_of(pile), with_graph)


def bytes_of(pile: Sequence[LivingTensor]) -> int:
    """Return the memory that tensors occupy together."""
    return sum(survivor.n_bytes for survivor in pile)


def _same_place(holder: TensorHolder | None, survivors: Mapping[int, LivingTensor]) -> list[LivingTensor]:
    if holder is None:
        return []
    there = {id(tensor_behind(held)) for held in holder.holds()}
    return [survivors[key] for key in there if key in survivors]


def is_expected(holder: TensorHolder | None, pile: Sequence[LivingTensor]) -> bool:
    """Return whether growth in a place is expected: it has a limit, or it is bookkeeping of Lightning."""
    if holder is None:
        return False
    owner = type(holder.root).__module__
    bookkeeping = owner.startswith(_BOOKKEEPERS) and bytes_of(pile) <= _MAX_BOOKKEEPING_BYTES
    return bookkeeping or any(_has_limit(link) for link in holder.links)


def _has_limit(container: Any) -> bool:
    if is_a(container, deque):
        return container.maxlen is not None
    return is_a(container, _LruCache) and container.cache_parameters()["maxsize"] is not None


def count_by_kind(tensors: Iterable[Tensor]) -> dict[tuple[tuple[int, ...], str], int]:
    """Return the number of tensors of each shape and type, the most frequent first, of equals the largest first."""
    counts = Counter((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    return dict(sorted(counts.items(), key=lambda kind: (-kind[1], -math.prod(kind[0][0]))))
