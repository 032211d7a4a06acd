"""What a precision means for parameters, batches and operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

PrecisionName = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision by Lightning's name.

    Attributes:
        dtype: What parameters and floating-point inputs are; None to leave them.
        autocast: What autocast computes in; None for no autocast.
        scales: Whether the loss is scaled (16-mixed).
    """

    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scales: bool = False

    @classmethod
    def parse(cls, name: str) -> Precision:
        """Read one of Lightning's names.

        Raises:
            ValueError: It is none that can be estimated.
        """
        if name not in _KNOWN:
            raise ValueError(f"Unknown precision {name!r}. Accepted are {', '.join(map(repr, _KNOWN))}.")
        return _KNOWN[name]

    def context(self) -> AbstractContextManager[Any]:
        """Where forward runs."""
        if self.dtype is not None:
            return _default_dtype(self.dtype)
        # The tensors that stand for CUDA's are on the CPU here, see `autocast`.
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a step makes is of this type too, as in Lightning's HalfPrecision.forward_context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_KNOWN = {
    "32-true": Precision(),
    "bf16-true": Precision(dtype=torch.bfloat16),
    "16-true": Precision(dtype=torch.float16),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-mixed": Precision(autocast=torch.float16, scales=True),
}
