"""Joins what the parts of a batch gave, as the whole batch would have given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools.oom.batch_parts import CannotSplitError


def join_parts(
    outputs: Sequence[Any], counts: Sequence[int], weights: Sequence[float] | None = None, *, is_strict: bool = False
) -> Any:
    """Join what the parts of a batch gave: as the whole batch would have given it.

    Tensors, arrays and lists as long as their parts are put one after the other; other floating-point tensors become
    the mean. Of anything else the first part's is taken.

    Args:
        outputs: What each part gave.
        counts: The parts' numbers of samples.
        weights: What means are weighted with; the numbers of samples if it is None.
        is_strict: Refuse anything else that differs.

    Raises:
        CannotSplitError: The parts gave something else that differs, if ``is_strict``.
    """
    first = outputs[0]
    weights = counts if weights is None else weights
    if (joined := _join_rows(outputs, counts)) is not None:
        return joined
    if isinstance(first, Tensor):
        if first.is_floating_point() and all(isinstance(one, Tensor) and one.shape == first.shape for one in outputs):
            return weighted_mean(outputs, weights)
    elif isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in outputs):
        return {key: join_parts([one[key] for one in outputs], counts, weights, is_strict=is_strict) for key in first}
    elif isinstance(first, (list, tuple)):
        return _join_sequences(outputs, counts, weights, is_strict=is_strict)
    if is_strict and not all(map(partial(_is_same, first), outputs)):
        raise CannotSplitError(f"its parts returned values of {type(first).__name__} that differ and cannot be joined")
    return first


def _join_rows(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """Join tensors or arrays that have a row for each sample, or numbers of samples; None for anything else."""
    if type(outputs[0]) is int:
        return sum(counts) if list(outputs) == list(counts) else None
    for kind, join in ((Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(isinstance(one, kind) and one.shape[:1] == (n,) for one, n in zip(outputs, counts, strict=True)):
            return join(list(outputs))
    return None


def _join_sequences(outputs: Sequence[Any], counts: Sequence[int], weights: Sequence[float], *, is_strict: bool) -> Any:
    first = outputs[0]
    # One item for each sample, unless these are columns, each with a row for each sample.
    is_of_columns = all(
        isinstance(item, Tensor) and item.dim() and len(item) == n
        for one, n in zip(outputs, counts, strict=True)
        for item in one
    )
    is_named = hasattr(first, "_fields")
    if [len(one) for one in outputs] == list(counts) and not is_of_columns and not is_named:
        return type(first)(item for one in outputs for item in one)
    joined = [join_parts(items, counts, weights, is_strict=is_strict) for items in zip(*outputs, strict=True)]
    return type(first)(*joined) if is_named else type(first)(joined)


def _is_same(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.shape == other.shape and torch.equal(first, other)
    return other is first or (isinstance(other, (int, float, str, bytes)) and bool(other == first))


def weighted_mean(values: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Return the mean of tensors, weighted with numbers of samples or of something else; of none there is no value."""
    total = sum(counts)
    first, *others = [value * (count / total) for value, count in zip(values, counts, strict=True) if count]
    return sum(others, first)
