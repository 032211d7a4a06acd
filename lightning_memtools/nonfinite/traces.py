"""Gradients of a step that is read late: recognised while they are there, never kept alive."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_memtools.nonfinite.confirm import BadTensor, count_bad
from lightning_memtools.nonfinite.detect import floats_of


class GradientTraces:
    """Weak references to gradients, and their versions when they were checked."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._traces = [
            (weakref.ref(parameter.grad), parameter.grad._version, parameter.numel())  # noqa: SLF001, the only way to see a write
            for parameter in parameters
            if parameter.grad is not None
        ]

    def bad(self, names: Sequence[str], norms: Sequence[float]) -> list[BadTensor]:
        """The bad ones, counted where they are still as they were when checked."""
        bad: list[BadTensor] = []
        for name, (reference, version, n_elements), norm in zip(names, self._traces, norms, strict=True):
            gradient = reference()
            floats = None if gradient is None or gradient._version != version else floats_of(gradient)  # noqa: SLF001, as above
            if floats is not None:
                bad += count_bad([(name, floats, norm)])
            elif not math.isfinite(norm):
                # Clipped, or overwritten by the next backward pass. The norm tells that it was bad, not how much of it.
                bad.append(BadTensor(name, None, None, n_elements, norm))
        return bad
