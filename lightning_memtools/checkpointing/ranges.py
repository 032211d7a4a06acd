"""Plans as plain data: which ranges of a chain's layers are recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Range:
    """Layers `start` to `stop` (not included) keep nothing in the forward pass but their input, and run again.

    Attributes:
        start: The first layer's index in its chain.
        stop: The index after the last.
        inner: Ranges within, which keep nothing when this range runs again, and then run once more themselves.
    """

    start: int
    stop: int
    inner: tuple[Range, ...] = ()

    def __str__(self) -> str:
        span = str(self.start) if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        return f"{span}({', '.join(map(str, self.inner))})" if self.inner else span


Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """What is recomputed of one chain.

    Attributes:
        name: The qualified name of the Sequential, or of the module that a pattern named.
        layers: The qualified names of its layers.
        ranges: What is recomputed; layers in none of these run as ever.
        outside: Why layers were left out, by index.
        forced: Whether a pattern named this module.
        plain_kept_bytes: What its layers keep from the forward pass for the backward pass without the plan.
        kept_bytes: The same with the plan.
        extra_operations: What its layers compute again in a step.
    """

    name: str
    layers: tuple[str, ...]
    ranges: Ranges
    outside: dict[int, str] = field(default_factory=dict)
    forced: bool = False
    plain_kept_bytes: int = 0
    kept_bytes: int = 0
    extra_operations: int = 0

    def without_ranges(self) -> ChainPlan:
        """The same chain with nothing recomputed."""
        return replace(self, ranges=(), kept_bytes=self.plain_kept_bytes, extra_operations=0)


def items(start: int, stop: int, ranges: Ranges) -> Iterator[Range | int]:
    """The pieces of one level in order: ranges, and the layers between them."""
    position = start
    for one in ranges:
        yield from range(position, one.start)
        yield one
        position = one.stop
    yield from range(position, stop)


def runs_again(ranges: Sequence[Range]) -> Iterator[int]:
    """The layers that run more than once, each as often as it is run again."""
    for one in ranges:
        yield from range(one.start, one.stop)
        yield from runs_again(one.inner)
