"""Describes the inputs and outputs of an operation: zeros, magnitudes, and affected samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memtools._torch import is_in_memory
from lightning_memtools.nonfinite.finite_checks import floats_of

_MOST_SAMPLES = 1024


NAN, POSITIVE, NEGATIVE = "nan", "inf", "-inf"


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Facts about a tensor among the inputs or outputs of an operation.

    Attributes:
        shape: Its shape.
        dtype: Its type, such as ``"float32"``.
        n_elements: The number of elements.
        n_zeros: The number of elements that are 0.
        n_bad: The number of elements that are NaN or Inf.
        largest: The largest magnitude among the finite ones; 0 where there are none.
        smallest: The smallest value among the finite ones.
        n_negative: The number of elements below 0.
        samples: Of a bad tensor, the first positions along dimension 0 that hold NaN or Inf; else those that hold 0.
    """

    shape: tuple[int, ...]
    dtype: str
    n_elements: int
    n_zeros: int
    n_bad: int
    largest: float
    smallest: float
    n_negative: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        if not self.shape and not self.n_bad:
            return f"{self.smallest:.4g}"
        parts = [
            f"{n} of {self.n_elements} {'is' if n == 1 else 'are'} {what}"
            for n, what in ((self.n_bad, "NaN or Inf"), (self.n_zeros, "0"), (self.n_negative, "below 0"))
            if n
        ]
        return f"{list(self.shape)} {self.dtype} ({', '.join([*parts, f'largest magnitude {self.largest:.4g}'])})"


def kinds_of(tensor: Tensor) -> frozenset[str]:
    """Return those of NaN, Inf and -Inf that a tensor holds; empty for a good one. Waits for the device."""
    floats = floats_of(tensor)
    if floats is None or bool(torch.isfinite(floats).all()):
        return frozenset()
    tests = ((NAN, torch.isnan), (POSITIVE, torch.isposinf), (NEGATIVE, torch.isneginf))
    return frozenset(kind for kind, test in tests if bool(test(floats).any()))


def values_of(tensor: Tensor) -> TensorFacts | None:
    """Describe a tensor; return None where it holds no floating point numbers."""
    floats = floats_of(tensor)
    if floats is None:
        return None
    floats = floats.detach()
    good = torch.isfinite(floats)
    finite = floats[good].double() if floats.device.type != "mps" else floats[good]
    bad, zeros = ~good, floats == 0
    n_bad = int(bad.sum())
    of_interest = bad if n_bad else zeros
    has_samples = floats.dim() > 0 and is_in_memory(tensor) and not tensor.is_complex()
    samples = of_interest.flatten(1).any(1) if has_samples and floats.dim() > 1 else of_interest
    return TensorFacts(
        shape=tuple(floats.shape if tensor.is_nested else tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        n_elements=floats.numel(),
        n_zeros=int(zeros.sum()),
        n_bad=n_bad,
        largest=float(finite.abs().max()) if finite.numel() else 0.0,
        smallest=float(finite.min()) if finite.numel() else 0.0,
        n_negative=int((floats < 0).sum()),
        samples=tuple(samples.nonzero()[:_MOST_SAMPLES, 0].tolist()) if has_samples else (),
    )
