"""Splits a batch into parts of whole samples, by one plain rule or by the user's function."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools._torch import tree_flatten, tree_unflatten
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.memory.nested_tensors import is_plain_object
from lightning_memtools.memory.oom_errors import is_out_of_memory

_VALUES = (type(None), bool, int, float, str, bytes, np.generic)
_NEXT = (
    "pass split_batch=, a function (batch, n_parts) that returns the parts, and loss_weight=, a function that counts "
    "the samples of one, if its tensors do not show them"
)


class CannotSplitError(Exception):
    """A batch cannot be run in parts; the message is the reason."""


def n_samples_of(batch: Any) -> int:
    """Return the size of dimension 0 that all tensors and arrays of a batch share.

    Raises:
        CannotSplitError: They share none, or the batch holds something that has no rows to cut.
    """
    leaves, _ = _flattened(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            raise CannotSplitError(f"the batch has a tensor of layout {leaf.layout}; {_NEXT}")
        if not isinstance(leaf, (Tensor, np.ndarray, list, tuple, *_VALUES)):
            raise CannotSplitError(f"the batch has a {type(leaf).__name__}, which has no rows to cut; {_NEXT}")
    sizes = {len(leaf): None for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim}
    if len(sizes) != 1:
        raise CannotSplitError(f"the batch has tensors of {[*sizes]} rows, so that its samples cannot be told; {_NEXT}")
    (n_samples,) = sizes
    for leaf in leaves:
        if isinstance(leaf, (list, tuple)) and len(leaf) != n_samples:
            raise CannotSplitError(f"the batch of {n_samples} samples has a list of {len(leaf)} items; {_NEXT}")
    return n_samples


def split_plainly(batch: Any, n_parts: int) -> list[Any]:
    """Split a batch into parts of nearly equal size, in its order.

    Every tensor and array that has a dimension 0 is cut there, and has to be as long as all others. A list or tuple of
    texts or numbers is cut too, and has to be as long. Single values and tensors without dimensions go into every part.

    Args:
        batch: Tensors and arrays in dictionaries, lists, tuples and named tuples. Parts are views of them.
        n_parts: The number of parts; there are fewer if the batch has fewer samples.

    Raises:
        CannotSplitError: The batch holds anything else.
    """
    n_samples = n_samples_of(batch)
    n_parts = min(n_parts, n_samples)
    leaves, rebuilt = _flattened(batch)
    ends = [n_samples * index // n_parts for index in range(n_parts + 1)]
    return [
        rebuilt([leaf if isinstance(leaf, _VALUES) or _is_scalar(leaf) else leaf[start:end] for leaf in leaves])
        for start, end in pairwise(ends)
    ]


def split_by_user(batch: Any, n_parts: int, split: Callable[[Any, int], Sequence[Any]]) -> list[Any]:
    """Return the parts that the user's function makes.

    Raises:
        CannotSplitError: It raises an error or returns no parts.
    """
    try:
        parts = list(split(copied_containers(batch), n_parts))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CannotSplitError(f"split_batch returned no list of parts: {in_one_line(error)}") from error
    if not parts:
        raise CannotSplitError("split_batch returned an empty list of parts")
    return parts


def copied_containers(batch: Any) -> Any:
    """Return a batch of the same tensors in new containers, so that a step that changes the batch leaves it whole."""
    leaves, rebuilt = _flattened(batch)
    return rebuilt([_copied_object(leaf) for leaf in leaves])


def _copied_object(leaf: Any) -> Any:
    if not isinstance(leaf, (Tensor, *_VALUES)) and is_plain_object(leaf):
        with suppress(Exception):  # a class of the user's, which may refuse in any way
            return copy(leaf)
    return leaf


def _flattened(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested containers, and the function that puts others in their places."""
    if isinstance(batch, UserDict):  # BatchEncoding of transformers; pytrees do not look inside
        kind = type(batch)
        leaves, form = tree_flatten(batch.data, is_leaf=_is_list_of_values)
        return leaves, lambda changed: kind(tree_unflatten(changed, form))
    leaves, form = tree_flatten(batch, is_leaf=_is_list_of_values)
    return leaves, lambda changed: tree_unflatten(changed, form)


def _is_list_of_values(thing: Any) -> bool:
    return type(thing) in {list, tuple} and len(thing) > 0 and all(isinstance(item, _VALUES) for item in thing)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim == 0
