"""Finds what a whole batch would have logged, from what its parts have logged. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


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
    """Return what the whole batch would have logged.

    A value that is the loss is put together as the loss is. Any other one is a mean over what `weights` count, or over
    as many samples as Lightning took each part's value for; or what its reduction says.
    The loss is the same tensor, or has the same value in all parts, unless each is of one sample: of one number, mean,
    sum and extremes are all that number.

    Args:
        n_samples: The number of samples of the batch, with those of parts that were left out.
        inferred: Returns the size that Lightning infers from the batch. It need not be the number of samples.
        logged: Of each part, what it has logged: `LoggedValue` by name.
        counts: The numbers of samples of the parts.
        weights: Over how much of each part its loss is a mean; None for the samples.
        losses: The parts' losses; None if there are none.
        adds: The loss of the batch is the sum of those of its parts.
    """
    whole = {}
    for key in dict.fromkeys(key for one in logged for key in one):
        rows = [index for index, one in enumerate(logged) if key in one]
        whole[key] = _whole(
            n_samples,
            inferred,
            [logged[row][key] for row in rows],
            [counts[row] for row in rows],
            weights=None if weights is None else [weights[row] for row in rows],
            losses=None if losses is None else torch.stack([losses[row].detach() for row in rows]),
            adds=adds,
        )
    return whole


def _whole(
    n_samples: int,
    inferred: Callable[[], int],
    parts: Sequence[Any],
    counts: Sequence[int],
    *,
    weights: Sequence[float] | None,
    losses: Tensor | None,
    adds: bool,
) -> Any:
    first = parts[0]
    of_loss = shares = _shares(weights or counts, first)
    size = None
    if first.size is not None:
        sizes = torch.stack([part.size for part in parts])
        if first.is_inferred:
            size = torch.full_like(sizes[0], first.n_calls * inferred())
        else:
            size, of_sizes = _whole_size(sizes // first.n_calls, counts, n_samples)
            size = size * first.n_calls
            shares = of_sizes if weights is None else shares

    def of_parts(values: Sequence[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.stack([value for value in values if value is not None])

    steps, epochs = of_parts([part.on_step for part in parts]), of_parts([part.of_epoch for part in parts])
    if epochs is not None and size is not None:
        epochs = epochs / sizes
    # With sync_dist=True, the values of the step are means over the ranks.
    is_loss = None
    if losses is not None and (max(counts) > 1 or all(part.is_loss for part in parts)):
        is_loss = _are_losses(steps if epochs is None else epochs, losses)

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
    if reduction == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def _mean(stacked: Tensor, shares: Tensor) -> Tensor:
    return torch.where(shares > 0, stacked * shares, 0.0).sum(0)  # of nothing there is no mean: it is NaN


def _are_losses(values: Tensor | None, losses: Tensor) -> Tensor:
    assert values is not None
    rounding = 2 * max(torch.finfo(losses.dtype).eps, torch.finfo(values.dtype).eps)
    losses = losses.reshape(-1).to(values)
    return ((values - losses).abs() <= rounding * losses.abs()).all()
