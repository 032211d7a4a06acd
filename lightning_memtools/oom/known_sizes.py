"""Remembers in how many parts batches of a size fit, so that the next ones need not fail first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.nested_tensors import tensors_in

# After so many batches that ran split, one is tried with half the splits; after a failure it takes twice as many.
_TRY_FEWER_AFTER = 50


@dataclass(slots=True)
class KnownSize:
    """The number of parts that batches with so many elements need.

    Attributes:
        n_elements: The elements of all tensors of the batch.
        n_parts: The number of parts.
        n_until_fewer: The number of batches until fewer are tried.
        patience: What that number begins with.
    """

    n_elements: int
    n_parts: int
    n_until_fewer: int = _TRY_FEWER_AFTER
    patience: int = _TRY_FEWER_AFTER


class KnownSizes:
    """The sizes of batches that did not fit as a whole."""

    def __init__(self) -> None:
        self._sizes: list[KnownSize] = []

    def of(self, batch: Any) -> KnownSize | None:
        """Return the entry for a batch: of those that are no larger, the one with most parts."""
        if not self._sizes:
            return None
        n_elements = _n_elements(batch)
        fitting = [one for one in self._sizes if one.n_elements <= n_elements]
        return max(fitting, key=lambda one: one.n_parts, default=None)

    def parts_to_try(self, known: KnownSize | None) -> int:
        """Return the number of parts to begin with, which is a smaller one after a while."""
        if known is None:
            return 1
        known.n_until_fewer -= 1
        if known.n_until_fewer > 0:
            return known.n_parts
        known.patience *= 2
        known.n_until_fewer = known.patience  # batches of other sizes may share this entry
        return max(1, known.n_parts // 2)

    def note_agreed(self, known: KnownSize | None, tried: int, agreed: int) -> None:
        """Note that ranks run more parts than this one was to try: it tries fewer at the next batch instead."""
        if known is not None and tried < min(agreed, known.n_parts):
            known.patience //= 2
            known.n_until_fewer = 1

    def remember(self, batch: Any, known: KnownSize | None, n_parts: int) -> KnownSize:
        """Remember that a batch needs so many parts, and return its entry."""
        n_elements = _n_elements(batch)
        if known is None or known.n_elements < n_elements:
            known = KnownSize(n_elements, n_parts)
            self._sizes.append(known)
        known.n_parts, known.n_until_fewer = n_parts, known.patience
        return known

    def note_success(self, known: KnownSize | None, n_parts: int) -> None:
        """Note that a batch ran at once in so many parts."""
        if known is not None and n_parts < known.n_parts:
            known.n_parts, known.n_until_fewer = n_parts, known.patience
            self._sizes = [one for one in self._sizes if one.n_parts > 1]


def _n_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))
