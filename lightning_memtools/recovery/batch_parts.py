"""Cuts a batch into parts of whole samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import pairwise
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools.memory.nested_tensors import attributes_of, is_plain_object, map_tensors, tensors_in
from lightning_memtools.memory.oom_errors import is_out_of_memory


class CannotSplitError(Exception):
    """A batch cannot be cut into parts; the message is the reason."""


def n_samples_in(batch: Any) -> int | None:
    """Return the size of the first dimension that a batch's tensors have in common; None where there is none.

    Of a batch that is made of a list, as those of PyTorch Geometric are, it is the length of that list. Of lists side
    by side, one of tensors and one of dictionaries, as images and targets of object detection, it is that of each,
    unless all tensors agree in their first dimension.
    """
    if _is_made_of_list(batch):
        return len(batch.to_data_list())
    if _is_lists_of_samples(batch):
        return len(batch[0])
    sizes = _sizes_in(batch)
    return sizes[0] if sizes and sizes.count(sizes[0]) > len(sizes) / 2 else None


def _sizes_in(batch: Any) -> list[int]:
    return [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]


@dataclass(frozen=True, slots=True)
class CutBatch:
    """The parts of a batch.

    Attributes:
        parts: Each part with its number of samples.
        is_counted: False if nothing tells the numbers for certain: they are the lengths of most tensors, or 1.
    """

    parts: list[tuple[Any, int]]
    is_counted: bool = True


def split_batch(batch: Any, n_parts: int, own: Any = None) -> list[tuple[Any, int]]:
    """Return the parts of `cut_batch`, each with its number of samples."""
    return cut_batch(batch, n_parts, own).parts


def cut_batch(batch: Any, n_parts: int, own: Any = None) -> CutBatch:
    """Cut a batch into parts of nearly equal size, in its order.

    Tensors and arrays that are as long as the batch are cut, and lists and tuples of as many items, whatever they are;
    everything else goes into every part.

    Args:
        batch: The batch. Parts are views of its tensors.
        n_parts: The number of parts; fewer are made of a batch with fewer samples.
        own: The user's function `(batch, n_parts) -> parts`, in place of this one. It may return pairs of a part and
            its number of samples.

    Raises:
        CannotSplitError: The batch has no dimension of samples, or the user's parts do not add up to it.
    """
    n_samples = n_samples_in(batch)
    if own is not None:
        return _own_parts(batch, n_samples, n_parts, own)
    n_samples = _checked(batch, n_samples)
    n_parts = min(n_parts, n_samples)
    ends = [n_samples * index // n_parts for index in range(n_parts + 1)]
    return CutBatch([(_part(batch, n_samples, slice(start, end)), end - start) for start, end in pairwise(ends)])


def _own_parts(batch: Any, n_samples: int | None, n_parts: int, own: Any) -> CutBatch:
    """Return the parts that the user's function makes.

    Raises:
        CannotSplitError: It raises, or returns something else than parts of this batch.
    """
    try:
        returned = own(batch, n_parts)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CannotSplitError(f"split_batch raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, Iterable):
        raise CannotSplitError(f"split_batch returned {returned!r} for {n_parts} parts, which is not a list of parts")
    parts = list(returned)
    if parts and all(type(one) is tuple and len(one) == 2 and type(one[1]) is int for one in parts):  # noqa: PLR2004
        counts = [n for _, n in parts]
        agrees = n_samples is None or not _is_counted(batch) or sum(counts) == n_samples
        if min(counts) < 0 or not sum(counts) or not agrees:
            raise CannotSplitError(f"split_batch returned parts of {counts} samples for a batch of {n_samples}")
        return CutBatch([(part, n) for part, n in parts if n])  # an empty part adds nothing
    sizes = [n_samples_in(part) for part in parts]
    filled = [(part, 1 if size is None else size) for part, size in zip(parts, sizes, strict=True) if size != 0]
    is_other = n_samples is not None and None not in sizes and sum(size for _, size in filled) != n_samples
    if not filled or is_other:
        raise CannotSplitError(f"split_batch returned parts of {sizes} samples for a batch of {n_samples}")
    return CutBatch(filled, is_counted=all(_is_counted(one) for one in (batch, *(part for part, _ in filled))))


def _is_counted(batch: Any) -> bool:
    """Return True if the number of samples is certain: those of a list, or the first dimension of every tensor."""
    return _is_made_of_list(batch) or _is_lists_of_samples(batch) or len(set(_sizes_in(batch))) == 1


def _checked(batch: Any, n_samples: int | None) -> int:
    if n_samples is None:
        kinds = f"{type(batch).__name__} of tensors of {[list(one.shape) for one in tensors_in(batch)][:4]}"
        raise CannotSplitError(
            f"the batch, a {kinds}, has no first dimension of samples that most of its tensors share; give the module "
            "a method split_batch(batch, n_parts) that returns the parts"
        )
    return n_samples


def samples_that_differ(batch: Any, most: int, own: Any = None) -> list[tuple[Any, int]]:
    """Return a few samples with the least padding, some more with the most, and both together, with their numbers.

    Args:
        batch: The batch. It has two samples at least.
        most: The largest number of samples in all; 2 at least.
        own: The user's function `(batch, n_parts) -> parts`: the samples are then those of one part.

    Raises:
        CannotSplitError: They cannot be cut out of the batch.
    """
    n_samples = n_samples_in(batch)
    if own is not None:
        halves = cut_batch(batch, 2, own)
        n_parts = -(-sum(n for _, n in halves.parts) // most) if halves.is_counted else 8
        while True:
            both = max(split_batch(batch, n_parts, own), key=lambda part: part[1])
            groups = split_batch(both[0], 2, own)
            if len(groups) == 2:  # noqa: PLR2004
                return [*groups, both]
            if n_parts == 1:
                raise CannotSplitError(
                    f"split_batch made {len(groups)} parts, and not 2, of a part of {both[1]} samples"
                )
            n_parts //= 2  # the parts were of one sample each
    n_samples = _checked(batch, n_samples)
    rows, most = _by_padding(batch, n_samples), min(most, n_samples)
    few, many = rows[: most // 2], rows[n_samples - most + most // 2 :]
    return [(_part(batch, n_samples, group), len(group)) for group in (few, many, few + many)]


def _by_padding(batch: Any, n_samples: int) -> list[int]:
    """Return the indices of the samples, sorted by the padding that their zeros suggest."""
    if _is_made_of_list(batch):
        sizes = [sum(tensor.numel() for tensor in tensors_in(one)) for one in batch.to_data_list()]
        return sorted(range(n_samples), key=lambda row: -sizes[row])
    least, rows = (False, 0.0), list(range(n_samples))
    rare: list[int] = []
    for tensor in tensors_in(batch):
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        if is_whole and tensor.dim() == 1 and len(tensor) == n_samples:
            # A mean weighted by classes shows where one of a rare class is among others.
            _, which, counts = torch.unique(tensor, return_inverse=True, return_counts=True)
            if int(counts.min()) < int(counts.max()):
                rare.append(int(counts[which].argmin()))
        if tensor.dim() > 1 and len(tensor) == n_samples and tensor.numel() and tensor.layout == torch.strided:
            # Masks and padding are 0, and labels to ignore are negative.
            unused = (tensor <= 0) if is_whole else tensor == 0
            counts = unused.reshape(n_samples, -1).sum(1).tolist()
            spread = (max(counts) - min(counts)) * n_samples / tensor.numel()
            # Labels and masks in whole numbers tell more than zeros among measurements.
            rank = (is_whole and spread > 0, spread)
            if rank > least:
                least, rows = rank, sorted(range(n_samples), key=counts.__getitem__)
    return [*(row for row in rows if row not in rare), *dict.fromkeys(rare)]


def _is_made_of_list(batch: Any) -> bool:
    return hasattr(batch, "to_data_list") and hasattr(type(batch), "from_data_list")


def _is_lists_of_samples(batch: Any) -> bool:
    return (
        type(batch) in {list, tuple}
        and len(batch) > 1
        and all(type(one) in {list, tuple} and len(one) == len(batch[0]) > 0 for one in batch)
        and all(any(all(isinstance(sample, kind) for sample in one) for one in batch) for kind in (Tensor, Mapping))
        and len(set(_sizes_in(batch))) > 1
    )


def _part(batch: Any, whole: int, rows: slice | list[int]) -> Any:
    """Return samples of a batch; a slice of them as views."""
    if _is_made_of_list(batch):
        return type(batch).from_data_list(_taken(batch.to_data_list(), whole, rows))
    if type(batch) not in {list, tuple}:
        return _cut(batch, whole, rows)
    # The batch itself is made of columns, also if it has as many items as samples.
    return type(batch)((_taken if _is_lists_of_samples(batch) else _cut)(one, whole, rows) for one in batch)


def _cut(thing: Any, whole: int, rows: slice | list[int]) -> Any:  # noqa: PLR0911, one per kind
    """Return the given samples of one item of a batch.

    Raises:
        CannotSplitError: Its samples cannot be told from columns, or no part of it can be made.
    """
    if isinstance(thing, (Tensor, np.ndarray)):
        return thing[rows] if thing.ndim and len(thing) == whole else thing
    if isinstance(thing, Mapping):
        return _rebuilt(thing, partial(_cut, whole=whole, rows=rows))
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_cut(one, whole, rows) for one in thing))
    if isinstance(thing, (list, tuple)):
        if len(thing) == whole and _is_of_samples(thing, whole):
            return _taken(thing, whole, rows)
        made = [_cut(one, whole, rows) for one in thing]
        return thing if all(map(is_, made, thing)) else type(thing)(made)
    is_data = is_dataclass(thing) and not isinstance(thing, type)
    if is_data or (is_plain_object(thing) and next(tensors_in(thing), None) is not None):
        new = copy(thing)
        for name, value in attributes_of(thing).items():
            if (part := _cut(value, whole, rows)) is not value:
                object.__setattr__(new, name, part)
        return new
    return map_tensors(thing, partial(_cut, whole=whole, rows=rows))


def _taken(items: Any, _whole: int, rows: slice | list[int]) -> Any:
    return items[rows] if isinstance(rows, slice) else type(items)(items[row] for row in rows)


def _is_of_samples(items: Sequence[Any], whole: int) -> bool:
    """Return whether a list with as many items as the batch has samples has one for each; else they are columns.

    Raises:
        CannotSplitError: They may be either.
    """
    are_columns = [may_be_column(item, whole) for item in items]
    if not any(are_columns):
        return True
    if len({(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in items}) > 1:
        return False
    if all(are_columns):
        raise CannotSplitError(
            f"the batch of {whole} samples has a {type(items).__name__} of {whole} items of {type(items[0]).__name__}, "
            f"each with {whole} rows, which may be samples or columns; give the module a method "
            "split_batch(batch, n_parts) that returns the parts"
        )
    return True


def may_be_column(item: Any, whole: int) -> bool:
    """Return True if an item may have one row for each of `whole` samples."""
    is_sized = isinstance(item, (list, tuple, np.ndarray)) and len(item) == whole
    return is_sized or any(size == whole for size in _sizes_in(item))


def _rebuilt(mapping: Mapping[Any, Any], cut: Callable[[Any], Any]) -> Any:
    """Return a mapping of the same class with samples of its values.

    Raises:
        CannotSplitError: Neither a copy takes them nor does the class.
    """
    values = {key: cut(value) for key, value in mapping.items()}
    kind: Any = type(mapping)
    if kind is dict or all(values[key] is value for key, value in mapping.items()):
        return values if kind is dict else mapping
    for make in (partial(_filled_copy, mapping, values, cut), partial(kind, values)):
        with suppress(Exception):  # a class of the user's, which may refuse in any way
            made = make()
            if type(made) is kind and made.keys() == values.keys() and all(made[key] is values[key] for key in values):
                return made
    raise CannotSplitError(
        f"the batch has a {kind.__name__}, a mapping of which no part can be made: neither a copy of it nor "
        f"{kind.__name__}(values) takes other values; give the module a method split_batch(batch, n_parts) that "
        "returns the parts"
    )


def _filled_copy(mapping: Any, values: dict[Any, Any], cut: Callable[[Any], Any]) -> Any:
    made = copy(mapping)
    for name, held in attributes_of(made).items():
        if isinstance(held, dict):  # a copy of the object shares it
            setattr(made, name, copy(held))
        elif isinstance(held, list):  # such as the tokens of each text in a BatchEncoding
            setattr(made, name, cut(held))
    for key, value in values.items():
        made[key] = value
    return made
