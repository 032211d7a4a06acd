"""Joins what the parts of a batch gave, as the whole batch would have given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools.oom.batch_parts import CannotSplitError, may_be_column


def join_parts(
    outputs: Sequence[Any], counts: Sequence[int], weights: Sequence[float] | None = None, *, is_strict: bool = False
) -> Any:
    """Join what the parts of a batch gave: as the whole batch would have given it.

    Tensors, arrays and lists as long as their parts are put one after the other; floating-point tensors of one number
    become the mean, and if not ``is_strict`` all others. Of anything else the first part's is taken.

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
        # In evaluation, what has dimensions and no row for each sample may have its samples in another dimension.
        is_mean = not is_strict or (first.dim() <= 1 and first.numel() == 1)
        if (
            is_mean
            and first.is_floating_point()
            and all(isinstance(one, Tensor) and one.shape == first.shape for one in outputs)
        ):
            return weighted_mean(outputs, weights)
    elif isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in outputs):
        return _of_same_class(
            first,
            {key: join_parts([one[key] for one in outputs], counts, weights, is_strict=is_strict) for key in first},
        )
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
    is_named = hasattr(first, "_fields")
    lengths = [len(one) for one in outputs]
    if not is_named and lengths == list(counts) and not _are_columns(outputs, counts, is_strict=is_strict):
        return type(first)(item for one in outputs for item in one)
    if len(set(lengths)) > 1:
        raise CannotSplitError(
            f"its parts of {list(counts)} samples returned a {type(first).__name__} of {lengths} items"
        )
    joined = [join_parts(items, counts, weights, is_strict=is_strict) for items in zip(*outputs, strict=True)]
    return type(first)(*joined) if is_named else type(first)(joined)


def _are_columns(outputs: Sequence[Any], counts: Sequence[int], *, is_strict: bool) -> bool:
    """Return whether sequences with an item for each sample are columns instead, each with a row for each sample."""
    if len(set(counts)) > 1:
        return False
    positions = list(zip(*outputs, strict=True))
    have_rows = [all(may_be_column(item, counts[0]) for item in items) for items in positions]
    if isinstance(outputs[0], tuple):
        return any(have_rows)
    are_alike = len({type(item) for item in outputs[0]}) == 1
    if not all(have_rows) or not are_alike:
        return any(have_rows) and not are_alike
    if is_strict and not isinstance(outputs[0][0], Tensor):
        kind = type(outputs[0][0]).__name__
        raise CannotSplitError(
            f"its parts of {counts[0]} samples returned lists of {counts[0]} items of {kind}, each with {counts[0]} "
            "rows, which may be samples or columns; return a tuple of columns"
        )
    return isinstance(outputs[0][0], Tensor)


def _of_same_class(mapping: Any, values: dict[Any, Any]) -> Any:
    if type(mapping) is not dict:
        with suppress(Exception):  # a class of the user's, which may refuse in any way
            made = copy(mapping)
            for key, value in values.items():
                made[key] = value
            return made
    return values


def _is_same(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.shape == other.shape and torch.equal(first, other)
    return other is first or (isinstance(other, (int, float, str, bytes)) and bool(other == first))


def weighted_mean(values: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Return the mean of tensors, weighted with numbers of samples or of something else; of none there is no value."""
    total = sum(counts)
    first, *others = [value * (count / total) for value, count in zip(values, counts, strict=True) if count]
    return sum(others, first)
