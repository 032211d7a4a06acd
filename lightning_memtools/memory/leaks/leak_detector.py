"""Detects leaks: watches the memory that stays allocated, and finds the tensors that pile up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_memtools.memory.leaks.growing_graphs import graph_clock, spans, tensors_with_graph
from lightning_memtools.memory.leaks.holder_search import (
    MAX_BOOKKEEPING_BYTES,
    MAX_LOOKUPS,
    HolderSearch,
    finding_of,
    is_expected,
)
from lightning_memtools.memory.leaks.holders import find_holder, names_of_modules
from lightning_memtools.memory.leaks.leak_report import LeakFinding, LeakReport
from lightning_memtools.memory.leaks.tensor_census import (
    LivingTensor,
    TensorCensus,
    bytes_of,
    count_by_kind,
    largest_signatures,
)
from lightning_memtools.memory.owned import OnDevice, Owned

_MIN_SHARE = 0.01
# Readings of growth after which even what fits is reported: a cache may fill for ten epochs.
_LONGEST_WAIT = 12


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
        survivors = self._census.take(owned.storages)
        if n_growths < self._next_look:
            return []
        self._next_look += self._next_look
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
        search = HolderSearch(survivors, self._find_scope().names)
        findings: list[LeakFinding] = []
        unplaced: list[LivingTensor] = []
        newest = [one for one in survivors if one.born == self._census.number]
        n_lookups = 0
        for signature in largest_signatures(newest):
            alike = [one for one in newest if one.signature == signature]
            # Every lookup takes many passes over all objects: it is not done for what is tiny beside a leak.
            if findings and bytes_of(alike) < _MIN_SHARE * bytes_of(newest):
                break
            while n_lookups < MAX_LOOKUPS:
                keys = [one.key for one in alike if one.key in search.remaining]
                n_lookups += bool(keys)
                found = search.take_pile(keys, self._is_growing)
                if found is None:  # all were found in another place already, or only a graph holds them
                    break
                holder, pile = found
                if is_expected(holder, pile):
                    continue
                if self._is_growing(pile):
                    findings.append(finding_of(holder, pile))
                else:
                    unplaced += pile
        if not findings:
            findings = self._without_holders([*search.remaining.values(), *unplaced])
        return sorted(findings, key=lambda finding: -finding.n_bytes)

    def _without_holders(self, survivors: list[LivingTensor]) -> list[LeakFinding]:
        """Return the kinds of tensors that grew for twice as long as usual in places that nobody knows."""
        if len(self._levels) <= 2 * self._warn_after:
            return []
        findings = []
        for signature in largest_signatures(survivors):
            pile = [survivor for survivor in survivors if survivor.signature == signature]
            # Where the holder is not known, it may be Lightning's bookkeeping too.
            is_much = bytes_of(pile) > MAX_BOOKKEEPING_BYTES and len(pile) > self._warn_after
            if is_much and self._is_growing(pile):
                findings.append(finding_of(None, pile))
        return findings

    def _is_growing(self, pile: list[LivingTensor]) -> bool:
        latest = self._census.number
        born = Counter(one.born for one in pile)
        if all(born[number] for number in range(latest - self._warn_after + 1, latest + 1)):
            return True
        grown_bytes = self._levels[-1] - self._levels[0]
        return len(self._levels) > 2 * self._warn_after and 2 * bytes_of(pile) >= grown_bytes
