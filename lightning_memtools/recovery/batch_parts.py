"""Splits a batch into parts of whole samples by one plain rule. All other batches need the user's `split_batch`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import tree_flatten, tree_unflatten

_VALUES = (type(None), bool, int, float, str, bytes, np.generic)
_NEXT = (
    "pass split_batch=, a function (batch, n_parts) that returns the parts, and loss_weight=, a function that counts "
    "the samples of one, if its tensors do not show them"
)


class CannotSplitError(Exception):
    """Raised if a batch cannot be split and run in parts. The message says why."""


def n_samples_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length that all its tensors, arrays and lists of values share.

    Raises:
        CannotSplitError: The lengths differ, or the batch holds an object that cannot be split.
    """
    leaves, _ = _flattened(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            raise CannotSplitError(f"the batch has a tensor of layout {leaf.layout}; {_NEXT}")
        if not isinstance(leaf, (Tensor, np.ndarray, list, tuple, *_VALUES)):
            raise CannotSplitError(f"the batch has a {type(leaf).__name__}, which has no rows to cut; {_NEXT}")
    sizes = [*dict.fromkeys(len(leaf) for leaf in leaves if _has_rows(leaf))]
    if len(sizes) != 1:
        raise CannotSplitError(
            f"the batch has tensors or lists of {sizes} rows, so that samples are not known; {_NEXT}"
        )
    return sizes[0]


def split_plainly(batch: Any, n_parts: int) -> list[Any]:
    """Split a batch into consecutive parts of nearly equal size.

    Tensors and arrays are split along dimension 0; lists and tuples of strings or numbers are split, too. All of them
    must have the same length. Single values and 0-dim tensors go into every part.

    Args:
        batch: Dictionaries, lists, tuples and named tuples of tensors, arrays and values. The parts hold views.
        n_parts: The number of parts; there are fewer if the batch has fewer samples.

    Raises:
        CannotSplitError: The lengths differ, or the batch holds anything else.
    """
    n_samples = n_samples_of(batch)
    n_parts = min(n_parts, n_samples)
    leaves, rebuilt = _flattened(batch)
    ends = [n_samples * index // n_parts for index in range(n_parts + 1)]
    return [rebuilt([leaf[start:end] if _has_rows(leaf) else leaf for leaf in leaves]) for start, end in pairwise(ends)]


def _flattened(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a nested batch, and a function that builds a batch of the same structure from new leaves."""
    if isinstance(batch, UserDict):  # BatchEncoding of transformers; pytrees do not look inside
        kind = type(batch)
        leaves, form = tree_flatten(batch.data, is_leaf=_is_list_of_values)
        return leaves, lambda changed: kind(tree_unflatten(changed, form))
    leaves, form = tree_flatten(batch, is_leaf=_is_list_of_values)
    return leaves, lambda changed: tree_unflatten(changed, form)


def _is_list_of_values(thing: Any) -> bool:
    return type(thing) in {list, tuple} and len(thing) > 0 and all(isinstance(item, _VALUES) for item in thing)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (list, tuple)) or (isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0)
