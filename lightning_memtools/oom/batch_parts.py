"""Cuts a batch into parts of whole samples, and joins what the parts gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_memtools.memory.nested_tensors import map_tensors, tensors_in


class CannotSplitError(Exception):
    """A batch cannot be cut into parts; the message is the reason."""


def n_samples_in(batch: Any) -> int | None:
    """Return the size of the first dimension that a batch's tensors have in common; None where there is none.

    Of a batch that is made of a list, as those of PyTorch Geometric are, it is the length of that list.
    """
    if _is_made_of_list(batch):
        return len(batch.to_data_list())
    sizes = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    return sizes[0] if sizes and sizes.count(sizes[0]) > len(sizes) / 2 else None


def split_batch(batch: Any, n_parts: int, own: Any = None) -> list[tuple[Any, int]]:
    """Cut a batch into parts of nearly equal size, each with its number of samples; their order is the batch's.

    Tensors that are as long as the batch are cut, and lists and tuples of as many texts or numbers; everything else
    goes into every part.

    Args:
        batch: The batch. Parts are views of its tensors.
        n_parts: The number of parts; fewer are made of a batch with fewer samples.
        own: The user's function `(batch, n_parts) -> parts`, in place of this one.

    Raises:
        CannotSplitError: The batch has no dimension of samples, or the user's parts do not add up to it.
    """
    n_samples = n_samples_in(batch)
    if own is not None:
        parts = list(own(batch, n_parts))
        sizes = [n_samples_in(part) for part in parts]
        counts = [size for size in sizes if size]
        if len(counts) != len(sizes) or (n_samples is not None and sum(counts) != n_samples):
            raise CannotSplitError(f"split_batch returned parts of {sizes} samples for a batch of {n_samples}")
        return list(zip(parts, counts, strict=True))
    if n_samples is None:
        kinds = f"{type(batch).__name__} of tensors of {[list(one.shape) for one in tensors_in(batch)][:4]}"
        raise CannotSplitError(
            f"the batch, a {kinds}, has no first dimension of samples that most of its tensors share; give the module "
            "a method split_batch(batch, n_parts) that returns the parts"
        )
    n_parts = min(n_parts, n_samples)
    ends = [n_samples * index // n_parts for index in range(n_parts + 1)]
    if _is_made_of_list(batch):
        samples = batch.to_data_list()
        return [(type(batch).from_data_list(samples[start:end]), end - start) for start, end in pairwise(ends)]
    return [(_cut(batch, n_samples, start, end), end - start) for start, end in pairwise(ends)]


def _is_made_of_list(batch: Any) -> bool:
    return hasattr(batch, "to_data_list") and hasattr(type(batch), "from_data_list")


def _cut(thing: Any, whole: int, start: int, end: int) -> Any:
    if type(thing) in {list, tuple}:
        if len(thing) == whole and not any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in thing):
            return thing[start:end]
        return type(thing)(_cut(one, whole, start, end) for one in thing)
    if type(thing) is dict:
        return {key: _cut(value, whole, start, end) for key, value in thing.items()}
    return map_tensors(thing, lambda tensor: tensor[start:end] if tensor.dim() and len(tensor) == whole else tensor)


def join_parts(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """Join what the parts of a batch gave: as the whole batch would have given it.

    Tensors as long as their parts are put one after the other; other floating-point tensors become the mean, weighted
    with the numbers of samples. Of anything else the first part's is taken.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(isinstance(one, Tensor) and one.dim() and len(one) == n for one, n in zip(outputs, counts, strict=True)):
            return torch.cat(list(outputs))
        is_same = all(isinstance(one, Tensor) and one.shape == first.shape for one in outputs)
        return weighted_mean(outputs, counts) if is_same and first.is_floating_point() else first
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in outputs):
        return {key: join_parts([one[key] for one in outputs], counts) for key in first}
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        if [len(one) for one in outputs] == list(counts):
            return type(first)(item for one in outputs for item in one)
        return type(first)(join_parts(items, counts) for items in zip(*outputs, strict=True))
    return first


def weighted_mean(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the mean of tensors, weighted with numbers of samples."""
    total = sum(counts)
    mean = values[0] * (counts[0] / total)
    for value, count in zip(values[1:], counts[1:], strict=True):
        mean = mean + value * (count / total)
    return mean
