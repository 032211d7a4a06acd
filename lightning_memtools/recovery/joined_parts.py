"""Joins the outputs and logged values of a batch's parts into those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memtools.recovery.batch_parts import CannotSplitError, may_be_column


def join_parts(
    outputs: Sequence[Any], counts: Sequence[int], weights: Sequence[float] | None = None, *, is_strict: bool = False
) -> Any:
    """Join the outputs of a batch's parts to the output that the whole batch would have given.

    Tensors, arrays and lists as long as their parts are put one after the other; floating-point tensors of one number
    become the mean, and if not ``is_strict`` all others. Of anything else the first part's is taken.

    Args:
        outputs: The output of each part.
        counts: The parts' numbers of samples.
        weights: The weights of means; None for the numbers of samples.
        is_strict: Raise if any other values differ.

    Raises:
        CannotSplitError: Any other values differ, if ``is_strict``.
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
    """Return the weighted mean of tensors; those of weight 0 may be NaN."""
    total = sum(counts)
    first, *others = [value * (count / total) for value, count in zip(values, counts, strict=True) if count]
    return sum(others, first)


def logged_by_whole(
    n_samples: int,
    inferred: Callable[[], int],
    logged: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    *,
    weights: Sequence[float] | None,
    losses: Sequence[Tensor] | None,
    adds: bool,
) -> dict[str, Any]:
    """Return the values that the whole batch would have logged. Does not wait for the device.

    A value that is the loss is put together as the loss is. Any other one is a mean over what `weights` count, or over
    as many samples as Lightning took each part's value for; or what its reduction says.
    The loss is the same tensor, or has the same value in all parts, unless each is of one sample: of one number, mean,
    sum and extremes are all that number.

    Args:
        n_samples: The number of samples of the batch, including parts that were left out.
        inferred: Returns the size that Lightning infers from the batch. It need not be the number of samples.
        logged: The values that each part logged: `LoggedValue` by name.
        counts: The numbers of samples of the parts.
        weights: The number of elements, such as tokens, that each part's loss is a mean of; None for the samples.
        losses: The parts' losses; None if there are none.
        adds: The loss of the batch is the sum of those of its parts.
    """
    no_losses: list[Any] = [None] * len(counts)
    per_part = list(zip(logged, counts, weights or counts, losses or no_losses, strict=True))
    whole = partial(_whole, n_samples, inferred, is_weighted=weights is not None, adds=adds)
    keys = dict.fromkeys(key for one in logged for key in one)
    return {key: whole([(one[key], *rest) for one, *rest in per_part if key in one]) for key in keys}


def _whole(
    n_samples: int, inferred: Callable[[], int], rows: Sequence[tuple[Any, ...]], *, is_weighted: bool, adds: bool
) -> Any:
    """Join one value from rows of (logged value, number of samples, weight, loss) of the parts."""
    parts, counts, weights, losses = zip(*rows, strict=True)
    first = parts[0]
    of_loss = shares = _shares(weights, first)
    size = None
    if first.size is not None:
        sizes = torch.stack([part.size for part in parts])
        if first.is_inferred:
            size = torch.full_like(sizes[0], first.n_calls * inferred())
        else:
            size, of_sizes = _whole_size(sizes // first.n_calls, counts, n_samples)
            size = size * first.n_calls
            shares = shares if is_weighted else of_sizes

    def of_parts(values: Sequence[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.stack([value for value in values if value is not None])

    steps, epochs = of_parts([part.on_step for part in parts]), of_parts([part.of_epoch for part in parts])
    if epochs is not None and size is not None:
        epochs = epochs / sizes
    # With sync_dist=True, the values of the step are means over the ranks.
    is_loss = None
    if losses[0] is not None and (max(counts) > 1 or all(part.is_loss for part in parts)):
        is_loss = _are_losses(steps if epochs is None else epochs, torch.stack([loss.detach() for loss in losses]))

    def put_together(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        by_reduction = _reduced(values, first.reduction, shares)
        if is_loss is None:
            return by_reduction
        return torch.where(is_loss, values.sum(0) if adds else _mean(values, of_loss), by_reduction)

    of_epoch = put_together(epochs)
    if of_epoch is not None and size is not None:
        of_epoch = of_epoch * size
    return first._replace(on_step=put_together(steps), of_epoch=of_epoch, size=size)


def _whole_size(sizes: Tensor, counts: Sequence[int], n_samples: int) -> tuple[Tensor, Tensor]:
    """Return the size that the whole batch would have given, and the parts' shares of it."""
    given = torch.tensor(counts).to(sizes.device, non_blocking=True)
    are_counts = (sizes == given).all()
    # `self.log(..., batch_size=...)` with the size of the whole batch, or with 1, is no number of what a part has.
    is_of_whole = (sizes[0] == 1) | (sizes[0] == n_samples)
    is_constant = (sizes == sizes[0]).all() & is_of_whole & ~are_counts
    shares = torch.where(is_constant, given / sum(counts), sizes / sizes.sum())
    size = torch.where(is_constant, sizes[0], torch.where(are_counts, n_samples, sizes.sum()))
    return size, shares


def _shares(weights: Sequence[float], like: Any) -> Tensor:
    value = like.on_step if like.of_epoch is None else like.of_epoch
    return torch.tensor(weights, dtype=value.dtype).to(value.device, non_blocking=True) / sum(weights)


def _reduced(stacked: Tensor, reduction: str, shares: Tensor) -> Tensor:
    if reduction == "mean":
        return _mean(stacked, shares)
    return stacked.sum(0) if reduction == "sum" else stacked.amax(0) if reduction == "max" else stacked.amin(0)


def _mean(stacked: Tensor, shares: Tensor) -> Tensor:
    return torch.where(shares > 0, stacked * shares, 0.0).sum(0)  # of nothing there is no mean: it is NaN


def _are_losses(values: Tensor | None, losses: Tensor) -> Tensor:
    assert values is not None
    rounding = 2 * max(torch.finfo(losses.dtype).eps, torch.finfo(values.dtype).eps)
    losses = losses.reshape(-1).to(values)
    return ((values - losses).abs() <= rounding * losses.abs()).all()
