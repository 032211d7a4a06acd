"""CUDA's lists of operators for autocast, on tensors that stand for CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """While entered, autocast on CPU tensors follows CUDA's lists."""
    yield
