"""A compact record of a program's requests to the allocator, which can be replayed under other settings.

The record holds the program's side: allocations have numbers, not addresses. Replaying the trace shows what the
allocator does with them. An event is one 64-bit word: its kind in the low bits and one number above. The stream, pool
and label of allocations are stored separately, and a word refers to them only when they change.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from lightning_memtools.memory.allocator.allocator_config import AllocatorConfig

_KIND_BITS = 4
_KIND_MASK = (1 << _KIND_BITS) - 1
_FORMAT = "lightning_memtools allocator trace"
_VERSION = 1


class TraceEventKind(IntEnum):
    """The kinds of events; the meaning of the event's number is in brackets."""

    MALLOC = 0
    """An allocation (bytes asked for). Allocations are numbered from 1 in the order of these events."""
    FREE = 1
    """A block was freed (number of its allocation)."""
    CONTEXT = 2
    """The following allocations have another stream, pool or label (index into `AllocationTrace.contexts`)."""
    FAILED_MALLOC = 3
    """A request for which there was no memory (bytes asked for). It has no number."""
    EMPTY_CACHE = 4
    """The cache was emptied."""
    STREAM = 5
    """The next `RECORD_STREAM` or `SYNCHRONIZE` means this stream (its number)."""
    RECORD_STREAM = 6
    """The stream of the last `STREAM` event uses a block (number of its allocation)."""
    SYNCHRONIZE = 7
    """A stream finished its work (1: the stream of the last `STREAM` event; 0: every stream)."""
    RELEASE_POOL = 8
    """A private pool will not be used again (its number)."""
    RESET_PEAKS = 9
    """The peaks were set to the current values."""
    USED_BY_OTHERS = 10
    """The memory that others hold of the device changed (bytes)."""
    POOL_OPTIONS = 11
    """A private pool got its options (4 times its number, plus 1 for no_split, plus 2 for use_on_oom)."""
    DELETE_POOL = 12
    """A private pool will not be used again, and its unused segments were released (its number)."""


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """The stream, the pool and the label that successive allocations have in common."""

    stream: int = 0
    pool: int = 0
    label: str | None = None


class AllocationTrace:
    """The events of one allocator since it was made, and the settings it had.

    Attributes:
        config: The settings of the allocator that was recorded.
        capacity: The capacity of its device in bytes; None for no limit.
        used_by_others: The memory that others held of the device at the start, in bytes.
        contexts: Streams, pools and labels of the allocations.
    """

    def __init__(self, config: AllocatorConfig, *, capacity: int | None = None, used_by_others: int = 0) -> None:
        self.config = config
        self.capacity = capacity
        self.used_by_others = used_by_others
        self.contexts: list[AllocationContext] = [AllocationContext()]
        self._words = array("q")
        self._index_of_context: dict[tuple[int, int, str | None], int] = {(0, 0, None): 0}
        self._context: tuple[int, int, str | None] = (0, 0, None)

    def __len__(self) -> int:
        return len(self._words)

    @property
    def n_bytes(self) -> int:
        """The host memory that the events occupy, without the labels."""
        return self._words.buffer_info()[1] * self._words.itemsize

    def add(self, kind: TraceEventKind, number: int = 0) -> None:
        """Record an event."""
        self._words.append(number << _KIND_BITS | kind)

    def add_malloc(self, n_bytes: int, stream: int, pool: int, label: str | None) -> None:
        """Record an allocation."""
        context = (stream, pool, label)
        if context != self._context:
            self._change_context(context)
        self._words.append(n_bytes << _KIND_BITS)

    def add_free(self, allocation: int) -> None:
        """Record that a block was freed."""
        self._words.append(allocation << _KIND_BITS | TraceEventKind.FREE)

    def add_failed_malloc(self, n_bytes: int, stream: int, pool: int, label: str | None) -> None:
        """Record a request for which there was no memory."""
        context = (stream, pool, label)
        if context != self._context:
            self._change_context(context)
        self.add(TraceEventKind.FAILED_MALLOC, n_bytes)

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield every event in order: its `TraceEventKind` as a number, and its own number."""
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
        """Return the trace whose sizes lie on the line through this trace, at 0, and another of the same events, at 1.

        Args:
            other: The trace at 1.
            where: The position on the line, or beyond its ends.
        """
        new = AllocationTrace(self.config, capacity=self.capacity, used_by_others=self.used_by_others)
        new.contexts = list(self.contexts)
        above, below = where.numerator, where.denominator
        for one, two in zip(self._words, other._words, strict=True):
            if one == two:
                new._words.append(one)
            else:
                size, difference = one >> _KIND_BITS, (two >> _KIND_BITS) - (one >> _KIND_BITS)
                new._words.append(max(1, size - (-difference * above // below)) << _KIND_BITS)
        return new

    def with_passing_blocks(self, blocks: Iterable[tuple[int, int]]) -> AllocationTrace:
        """Return the trace with blocks that are allocated and freed at once.

        Args:
            blocks: For each the number of words before it, and its bytes; in their order.
        """
        new = AllocationTrace(self.config, capacity=self.capacity, used_by_others=self.used_by_others)
        new.contexts = list(self.contexts)
        numbers, count, begin = [0], 0, 0  # the new number of each allocation; how many there are now
        for end, n_bytes in (*blocks, (len(self._words), 0)):
            for word in self._words[begin:end]:
                kind, number = word & _KIND_MASK, word >> _KIND_BITS
                if kind == TraceEventKind.MALLOC:
                    count += 1
                    numbers.append(count)
                elif kind in {TraceEventKind.FREE, TraceEventKind.RECORD_STREAM}:
                    number = numbers[number]
                new.add(TraceEventKind(kind), number)
            begin = end
            if n_bytes:
                count += 1
                new.add(TraceEventKind.MALLOC, n_bytes)
                new.add(TraceEventKind.FREE, count)
        return new

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, as JSON."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "config": asdict(self.config),
            "capacity": self.capacity,
            "used_by_others": self.used_by_others,
            "contexts": [[context.stream, context.pool, context.label] for context in self.contexts],
            "events": self._words.tolist(),
        }
        Path(path).write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> AllocationTrace:
        """Read a trace that `save` wrote.

        Raises:
            ValueError: The file is not such a trace.
        """
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) == (_FORMAT, _VERSION):
                return cls._from_content(content)
            problem = f"format {content['format']!r}, version {content['version']!r}"
        except (ValueError, KeyError, TypeError) as error:
            problem = repr(error)
        raise ValueError(
            f"{path} is not an allocator trace of version {_VERSION}, as AllocationTrace.save writes it: {problem}."
        )

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> AllocationTrace:
        settings = content["config"]
        settings["roundup_power2_divisions"] = tuple(settings["roundup_power2_divisions"])
        config = AllocatorConfig(**settings)
        trace = cls(config, capacity=content["capacity"], used_by_others=content["used_by_others"])
        trace.contexts = [AllocationContext(*context) for context in content["contexts"]]
        trace._words = array("q", content["events"])
        return trace

    def _change_context(self, context: tuple[int, int, str | None]) -> None:
        index = self._index_of_context.get(context)
        if index is None:
            index = self._index_of_context[context] = len(self.contexts)
            self.contexts.append(AllocationContext(*context))
        self._context = context
        self.add(TraceEventKind.CONTEXT, index)
