"""Looks at tensors one by one: which hold NaN or Inf, and how many. Waits for the device: for use after a trip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memtools.nonfinite.detect import floats_of, norms_of


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor that holds NaN or Inf.

    Attributes:
        name: The parameter's or buffer's name.
        n_nan: How many elements are NaN; of a sharded tensor, in this rank's shard. None where only the norm is known.
        n_inf: How many are Inf, likewise.
        n_elements: How many elements there are.
        norm: The L2 norm: NaN if an element is NaN, else inf.
    """

    name: str
    n_nan: int | None
    n_inf: int | None
    n_elements: int
    norm: float = math.nan

    @property
    def share(self) -> float | None:
        """The share of elements that are NaN or Inf, where they were counted."""
        if self.n_nan is None or self.n_inf is None:
            return None
        return (self.n_nan + self.n_inf) / self.n_elements

    @property
    def amount(self) -> str:
        """How many of its elements are bad, as text."""
        if self.share is None:
            return f"holds {'NaN' if math.isnan(self.norm) else 'Inf'}, not counted"
        kinds = [f"{n} {kind}" for n, kind in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if n]
        return f"{' and '.join(kinds)} of {self.n_elements}, {100 * self.share:.3g}%"

    def __str__(self) -> str:
        return f"{self.name} ({self.amount})"


def find_bad(named: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    """The tensors that hold NaN or Inf, in the order given. A norm that overflows does not make a tensor bad."""
    pairs = [(name, floats) for name, tensor in named if (floats := floats_of(tensor)) is not None]
    if not pairs:
        return []
    norms = norms_of([floats for _, floats in pairs])
    by_device: dict[torch.device, list[int]] = {}
    for index, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(index)
    values = [0.0] * len(norms)
    for indices in by_device.values():
        read = torch.stack([norms[index].float() for index in indices]).tolist()  # one wait per device
        for index, value in zip(indices, read, strict=True):
            values[index] = value
    return count_bad([(*pair, value) for pair, value in zip(pairs, values, strict=True)])


def count_bad(measured: Sequence[tuple[str, Tensor, float]]) -> list[BadTensor]:
    """Of (name, floats, norm), those with bad elements. A finite norm proves its tensor finite, so few are counted."""
    bad = []
    for name, floats, norm in measured:
        if math.isfinite(norm):
            continue
        n_nan, n_inf = int(floats.isnan().sum()), int(floats.isinf().sum())
        if n_nan or n_inf:
            bad.append(BadTensor(name, n_nan, n_inf, floats.numel(), norm))
    return bad
