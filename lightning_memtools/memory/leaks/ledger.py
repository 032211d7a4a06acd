"""The ledger: watches what stays allocated, and names what grows."""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memtools.memory.host import blocks_to_walk
from lightning_memtools.memory.leaks.census import Census, Survivor
from lightning_memtools.memory.leaks.graphs import graph_clock, spans, tensors_with_graph
from lightning_memtools.memory.leaks.referrers import Holder, find_holder, first_held
from lightning_memtools.memory.leaks.steps import is_a
from lightning_memtools.memory.owned import OnDevice, Owned

# Naming one holder takes a pass over all Python objects for every link of the way to it, so it is done for the few
# kinds of tensors that take the most memory.
MAX_LOOKUPS = 8
MAX_CANDIDATES = 64
_MIN_SHARE = 0.01
# About what a census takes for each block of memory that Python has given out: 0.1 s were measured with 19 million.
CENSUS_SECONDS_PER_BLOCK = 1e-8
# One that takes longer is left out where growth may yet prove to be nothing.
QUICK_CENSUS_S = 0.05
# The small tensors that Lightning's own callbacks keep, such as the scores of the best checkpoints, are no leak.
_MAX_BOOKKEEPING_BYTES = 2**20
_LruCache = type(functools.lru_cache(lambda: None))
_BOOKKEEPERS = ("lightning.", "pytorch_lightning.", "lightning_memtools.")


@dataclass(frozen=True, slots=True)
class Finding:
    """Tensors that pile up in one place.

    Attributes:
        holder: Who holds them; None if Python does not know.
        tensors: How many, by shape and type.
        n_bytes: What they take on the device; 0 where it is their graph that grows.
        with_graph: How many of them hold an autograd graph.
        graph_grows: Whether it is their graph that grows, not their number.
    """

    holder: Holder | None
    tensors: Mapping[tuple[tuple[int, ...], str], int]
    n_bytes: int
    with_graph: int
    graph_grows: bool = False


@dataclass(frozen=True, slots=True)
class Accusation:
    """What the one warning is made of.

    Attributes:
        in_a_row: How many times in a row memory or a graph grew.
        grown_bytes: By how much memory grew in that time, beyond what the model and its optimizers own.
        findings: What grows, largest first.
    """

    in_a_row: int
    grown_bytes: int
    findings: list[Finding]


@dataclass(slots=True)
class Surroundings:
    """Where holders are looked for, and what they are called.

    Attributes:
        roots: Objects whose attributes are searched for graphs: the model, callbacks, the data module.
        names: Identity to name of all objects that have one.
        stop_at: Objects that the search leaves alone.
    """

    roots: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    stop_at: list[Any] = field(default_factory=list)


class Ledger:
    """Accuses what grows in `warn_after` readings in a row. Healthy runs are spared by what counts as growing.

    * What the model and its optimizers own does not count, whenever it is made.
    * Tensors count if some that were made in each of those times are all still there, in the same place. So whatever
      is replaced, of whatever size, is not accused: the last batch, the last outputs, running means.
    * A single tensor that is replaced by a larger one counts only after twice as many readings, and if it makes up half
      of the growth: sizes that vary by chance also rise three times in a row now and then.
    * A graph counts if it has nodes from each of those times.
    * Where a census is slow, the first ones are left out: growth that does not go on was not worth one. Of the times
      before the first census it is not known when tensors were made. Tensors count then if what that census found is at
      least what as many times bring, at the rate of the latest; if it is not, they are looked at again as soon as there
      have been enough censuses.
    * What sits in a container with a limit of its own (`deque(maxlen=...)`, `lru_cache(maxsize=...)`) never counts.

    Args:
        on_device: Which tensors count.
        warn_after: How many times in a row.
        find_surroundings: Called when a holder has to be named.
    """

    def __init__(
        self, on_device: OnDevice, *, warn_after: int, find_surroundings: Callable[[], Surroundings] = Surroundings
    ) -> None:
        self._warn_after = warn_after
        self._find_surroundings = find_surroundings
        self._census = Census(on_device)
        self._levels: list[int] = []
        self._next_look = warn_after
        # The order numbers of autograd's nodes at the last readings.
        self._clocks: deque[int] = deque(maxlen=warn_after + 1)
        self.has_accused = False

    def read(
        self, unaccounted_bytes: int, owned: Owned, *, collect: Callable[[], int] | None = None
    ) -> Accusation | None:
        """Take one reading, at the same place in every epoch; the first is what the others are compared with.

        Args:
            unaccounted_bytes: Allocated, without what is owned.
            owned: What the model and its optimizers own.
            collect: Collects garbage and gives the first figure again; nobody is accused without that.
        """
        if self.has_accused:
            return None
        self._clocks.append(graph_clock())
        findings = self._growing_graphs()
        if self._has_grown(unaccounted_bytes, collect):
            findings += self._look(owned)
        if not findings:
            return None
        self.has_accused = True
        self._census.restart()
        in_a_row = max(self._warn_after, len(self._levels) - 1)
        return Accusation(in_a_row, self._levels[-1] - self._levels[0], findings)

    def _has_grown(self, unaccounted_bytes: int, collect: Callable[[], int] | None) -> bool:
        """Whether memory grew since the last reading; if not, all begins anew."""
        if self._levels and unaccounted_bytes > self._levels[-1]:
            if collect is not None and len(self._levels) == self._next_look:  # it is about to become serious
                unaccounted_bytes = collect()
            if unaccounted_bytes > self._levels[-1]:
                self._levels.append(unaccounted_bytes)
                return True
        self._levels = [unaccounted_bytes]
        self._next_look = self._warn_after
        self._census.restart()
        return False

    def _look(self, owned: Owned) -> list[Finding]:
        """Note who was born since the last reading, and when growth has gone on for long enough, find what piles up."""
        n_growths = len(self._levels) - 1
        # Of a longer wait for the next look, only the last readings matter.
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

    def _growing_graphs(self) -> list[Finding]:
        if len(self._clocks) <= self._warn_after:
            return []
        around = self._find_surroundings()
        findings = []
        clocks = tuple(self._clocks)
        growing = [t for t in tensors_with_graph(around.roots, stop_at=around.stop_at) if spans(t, clocks)]
        for tensor in growing[:MAX_LOOKUPS]:
            holder = find_holder(tensor, around.names, ignore=(growing,))
            findings.append(Finding(holder, _by_kind([tensor]), 0, 1, graph_grows=True))
        return findings

    def _piles(self, survivors: list[Survivor]) -> list[Finding]:
        """The places where tensors piled up since growth began."""
        names = self._find_surroundings().names
        remaining = {id(survivor.tensor): survivor for survivor in survivors}
        findings: list[Finding] = []
        newest = [survivor for survivor in survivors if survivor.born == self._census.number]
        lookups = 0
        for signature in _largest_signatures(newest):
            # Every lookup takes many passes over all objects: what is next to nothing beside a leak is not looked for.
            if findings and _bytes_of([s for s in newest if s.signature == signature]) < _MIN_SHARE * _bytes_of(newest):
                break
            while lookups < MAX_LOOKUPS:
                young = [s.tensor for s in newest if id(s.tensor) in remaining and s.signature == signature]
                lookups += bool(young)
                tensor = first_held(young[-MAX_CANDIDATES:], ignore=(young, *survivors))
                if tensor is None:  # found in another place already, or held by a graph alone
                    break
                holder = find_holder(tensor, names, ignore=(young, *survivors))
                pile = _same_place(holder, remaining) or [remaining[id(tensor)]]
                for survivor in pile:
                    del remaining[id(survivor.tensor)]
                if not _is_spared(holder, pile) and self._is_growing(pile):
                    findings.append(_finding(holder, pile))
        return sorted(findings, key=lambda finding: -finding.n_bytes)

    def _is_growing(self, pile: list[Survivor]) -> bool:
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
        return len(self._levels) > 2 * self._warn_after and 2 * _bytes_of(pile) >= grown_bytes


def _census_is_slow() -> bool:
    return CENSUS_SECONDS_PER_BLOCK * blocks_to_walk() > QUICK_CENSUS_S


def _largest_signatures(survivors: Iterable[Survivor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Those with the most bytes, the first of them first."""
    sizes: Counter[tuple[torch.Size, torch.dtype]] = Counter()
    for survivor in survivors:
        sizes[survivor.signature] += survivor.n_bytes
    return [signature for signature, _ in sizes.most_common(MAX_LOOKUPS)]


def _finding(holder: Holder | None, pile: Sequence[Survivor]) -> Finding:
    tensors = [survivor.tensor for survivor in pile]
    with_graph = sum(tensor.grad_fn is not None for tensor in tensors)
    return Finding(holder, _by_kind(tensors), _bytes_of(pile), with_graph)


def _bytes_of(pile: Sequence[Survivor]) -> int:
    return sum(survivor.n_bytes for survivor in pile)


def _same_place(holder: Holder | None, survivors: Mapping[int, Survivor]) -> list[Survivor]:
    if holder is None:
        return []
    there = {id(held) for held in holder.holds()}
    return [survivors[key] for key in there if key in survivors]


def _is_spared(holder: Holder | None, pile: Sequence[Survivor]) -> bool:
    """Whether growth is no leak there: it has a limit, or it is bookkeeping of Lightning's own."""
    if holder is None:
        return False
    owner = type(holder.root).__module__
    bookkeeping = owner.startswith(_BOOKKEEPERS) and _bytes_of(pile) <= _MAX_BOOKKEEPING_BYTES
    return bookkeeping or any(_has_limit(link) for link in holder.links)


def _has_limit(container: Any) -> bool:
    if is_a(container, deque):
        return container.maxlen is not None
    return is_a(container, _LruCache) and container.cache_parameters()["maxsize"] is not None


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[tuple[int, ...], str], int]:
    """How many there are of each shape and type: the most frequent first, of equals the largest."""
    counts = Counter((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    return dict(sorted(counts.items(), key=lambda kind: (-kind[1], -math.prod(kind[0][0]))))
