"""Predicts the memory of a training step on fake tensors."""

from __future__ import annotations

from lightning_memtools.estimate.estimator import estimate_memory
from lightning_memtools.estimate.memory_estimate import MemoryEstimate

__all__ = ["MemoryEstimate", "estimate_memory"]
