"""A compact record of a program's requests to the allocator, which can be replayed under other settings.

The record holds the program's side: allocations have numbers, not addresses. Replaying the trace shows what the
allocator does with them. An event is one 64-bit word: its kind in the low bits and one number above. The stream and
label of allocations are stored separately, and a word refers to them only when they change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum
from fractions import Fraction

from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig

_KIND_BITS = 4
_KIND_MASK = (1 << _KIND_BITS) - 1

AllocationContext = tuple[int, str | None]
"""The stream and the label that successive allocations have in common."""


class TraceEventKind(IntEnum):
    """The kinds of events in a trace. The comment on each kind explains the number that such an event carries."""

    MALLOC = 0
    """An allocation (bytes asked for). Allocations are numbered from 1 in the order of these events."""
    FREE = 1
    """A block was freed (number of its allocation)."""
    CONTEXT = 2
    """The following allocations have another stream or label (index into `AllocationTrace.contexts`)."""
    FAILED_MALLOC = 3
    """A request for which there was no memory (bytes asked for). It has no number."""
    EMPTY_CACHE = 4
    """The cache was emptied."""
    RESET_PEAKS = 5
    """The peaks were set to the current values."""


class AllocationTrace:
    """Records the events of one allocator since its creation, together with its settings.

    Attributes:
        config: The settings of the allocator that was recorded.
        capacity: The capacity of its device in bytes; None for no limit.
        used_by_others: The bytes of the device that were held outside of this allocator.
        contexts: The distinct (stream, label) pairs of the allocations, in the order of their first use.
    """

    def __init__(self, config: AllocatorConfig, *, capacity: int | None = None, used_by_others: int = 0) -> None:
        self.config = config
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.contexts: list[AllocationContext] = [(0, None)]
        self._words = array("q")
        self._index_of_context: dict[AllocationContext, int] = {(0, None): 0}
        self._context: AllocationContext = (0, None)

    def __len__(self) -> int:
        return len(self._words)

    def add(self, kind: TraceEventKind, number: int = 0) -> None:
        """Record an event; what `number` means depends on the kind (see `TraceEventKind`)."""
        self._words.append(number << _KIND_BITS | kind)

    def add_malloc(self, n_bytes: int, stream: int, label: str | None) -> None:
        """Record an allocation."""
        self._enter_context((stream, label))
        self._words.append(n_bytes << _KIND_BITS)

    def add_failed_malloc(self, n_bytes: int, stream: int, label: str | None) -> None:
        """Record a request for which there was no memory."""
        self._enter_context((stream, label))
        self.add(TraceEventKind.FAILED_MALLOC, n_bytes)

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield every event in order as a pair: its kind (a `TraceEventKind` as an int) and its number."""
        for word in self._words:
            yield word & _KIND_MASK, word >> _KIND_BITS

    def has_same_events(self, other: AllocationTrace) -> bool:
        """Return whether another trace holds the same events in the same order; the sizes of allocations may differ."""
        pairs = zip(self._words, other._words, strict=False)
        return (
            len(self) == len(other)
            and self.contexts == other.contexts
            and all(one == two or (one | two) & _KIND_MASK == TraceEventKind.MALLOC for one, two in pairs)
        )

    def extrapolated(self, other: AllocationTrace, where: Fraction) -> AllocationTrace:
        """Return a new trace whose sizes are extrapolated linearly from this trace and `other`.

        Args:
            other: The second trace, with the same events.
            where: The position of the new trace: 0 is this trace, 1 is `other`. Other numbers are allowed, too.
        """
        new = AllocationTrace(self.config, capacity=self.capacity, used_by_others=self.used_by_others)
        new.contexts = list(self.contexts)
        above, below = where.numerator, where.denominator
        for one, two in zip(self._words, other._words, strict=True):
            word = one
            if one != two:
                size, difference = one >> _KIND_BITS, (two >> _KIND_BITS) - (one >> _KIND_BITS)
                word = max(1, size - (-difference * above // below)) << _KIND_BITS
            new._words.append(word)
        return new

    def _enter_context(self, context: AllocationContext) -> None:
        if context == self._context:
            return
        index = self._index_of_context.get(context)
        if index is None:
            index = self._index_of_context[context] = len(self.contexts)
            self.contexts.append(context)
        self._context = context
        self.add(TraceEventKind.CONTEXT, index)
