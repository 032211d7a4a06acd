"""Chooses which parts of a step to run twice: the least recomputation for every amount of memory at once.

A dynamic program over the units of the forward pass, from the last to the first. With so much memory left, a unit
keeps its tensors, or a span of units that begins here keeps its input alone and runs again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_memtools.checkpointing.step_units import Unit

_SLOTS = 2000
_RANGE = 1e-4  # the time of the host for one more range, as a part of the operations of the forward pass
INFINITE = float("inf")

Span = tuple[int, int]
"""The first unit of a part that may run twice, and the index after its last."""


class LeastRecomputation:
    """The spans of least recomputation, by the memory that a step may take.

    Args:
        units: The units of the step.
        spans: The spans that may run twice.
        limit_bytes: The largest amount of memory to solve for.
        forced: Those of the spans that have to run twice.
        offload: Whether the inputs of spans take no memory.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        spans: Sequence[Span],
        limit_bytes: int,
        forced: Sequence[Span] = (),
        *,
        offload: bool = False,
    ) -> None:
        self._units, self._forced, self._offload = units, dict(forced), offload
        self._slot = limit_bytes / _SLOTS
        self._range = _RANGE * sum(unit.operations for unit in units)
        self._between = boundaries(units)
        ends: dict[int, set[int]] = {}
        for start, stop in (*spans, *forced):
            if units[start].may_start:
                ends.setdefault(start, set()).add(stop)
        self._options = {start: list(_needs(units, self._between, start, stops)) for start, stops in ends.items()}
        plain = [0.0]
        held = True
        for unit in units:
            added, held = unit.keep(input_held=held)
            plain.append(plain[-1] + added)
        # Differences of rounded sums: many small units would all be rounded to nothing.
        self._added = np.diff(np.rint(np.array(plain) / self._slot)).astype(int)
        self._plain = plain
        # The least operations for units from here on, by whether their input is held and by the memory that is left.
        self._table = np.full((len(units) + 1, 2, _SLOTS + 1), INFINITE)
        self._table[-1] = 0.0
        for at in range(len(units) - 1, -1, -1):
            for held in (False, True):
                self._table[at, int(held)] = np.min([costs for _, costs in self._choices(at, held=held)], axis=0)

    def frontier(self) -> list[tuple[int, int]]:
        """Return the peak in bytes and the extra operations of each choice that no other one beats, by falling peak."""
        costs = self._table[0, 1]
        return [
            (int(slot * self._slot) + 1, int(costs[slot]))
            for slot in range(_SLOTS, -1, -1)
            if costs[slot] < INFINITE and (slot == 0 or costs[slot - 1] > costs[slot])
        ]

    def best(self, limit_bytes: float) -> list[Span] | None:
        """Return the spans to run twice for a peak within a limit; None if there are none."""
        left, at, held = min(int(limit_bytes / self._slot), _SLOTS), 0, True
        if left < 0 or self._table[0, 1, left] == INFINITE:
            return None
        found: list[Span] = []
        while at < len(self._units):
            options = list(self._choices(at, held=held))
            (stop, used, held), _ = min(options, key=lambda one: one[1][left])
            if stop is not None:
                found.append((at, stop))
            at, left = stop if stop is not None else at + 1, left - used
        return found

    def _choices(self, at: int, *, held: bool) -> Iterator[tuple[tuple[int | None, int, bool], np.ndarray]]:
        """Yield what a unit may do: the end of its span, the memory used, whether the output is held; and the costs."""
        unit = self._units[at]
        size = 0 if held else self._between[at]
        if at not in self._forced:
            added, out_held = unit.keep(input_held=held)
            slots = max(int(self._added[at]) + round((added - self._plain[at + 1] + self._plain[at]) / self._slot), 0)
            need = max(added + unit.backward_need, size + unit.forward_base + unit.forward_bytes)
            yield (None, slots, out_held), self._shifted(at + 1, slots, need, 0, held=out_held)
        for stop, need, operations in self._options.get(at, ()):
            if self._forced.get(at, stop) == stop:
                slots = 0 if self._offload else round(size / self._slot)
                yield (
                    (stop, slots, False),
                    self._shifted(stop, slots, size + need, operations + self._range, held=False),
                )

    def _shifted(self, then: int, slots: int, need: float, operations: float, *, held: bool) -> np.ndarray:
        costs = np.full(_SLOTS + 1, INFINITE)
        first = max(slots, round(need / self._slot))
        if first <= _SLOTS:
            costs[first:] = self._table[then, int(held), first - slots : _SLOTS + 1 - slots] + operations
        return costs


def boundaries(units: Sequence[Unit]) -> list[int]:
    """Return the bytes of the tensors that are passed into each unit, and out of the last."""
    found = [0]
    for unit in units:
        found.append(unit.out_bytes or (found[-1] if unit.same_storage else 0))
    return found


def _needs(
    units: Sequence[Unit], between: Sequence[int], start: int, stops: set[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield for spans from one start their end, the memory to run them again besides the input, and the operations."""
    kept, held, first, forward, backward, operations, again = 0, True, 0, 0, 0, 0, 0
    for at in range(start, max(stops)):
        unit = units[at]
        first = max(first, (0 if at == start else between[at]) + unit.forward_base + unit.forward_bytes)
        forward = max(forward, kept + (0 if held else between[at]) + unit.forward_bytes)
        added, held = unit.keep(input_held=held)
        kept += added
        backward = max(backward, kept + unit.backward_need)
        if unit.saves:
            again = operations + unit.operations - unit.tail_operations
        operations += unit.operations
        if at + 1 in stops:
            yield at + 1, max(first, backward, forward + unit.backward_base), again
