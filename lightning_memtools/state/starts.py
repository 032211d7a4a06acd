"""Records what a step begins with: an optimizer's settings, to restore them; and which tensors were written since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import WRITE_COUNT, write_count_or_none
from lightning_memtools.memory.nested_tensors import named_tensors


def versions_of(batch: Any) -> tuple[int, ...]:
    """Return how often each tensor of a batch was written in place; -1 where it is not counted."""
    parts = (batch,) if type(batch) is Tensor else batch
    if type(parts) in {tuple, list} and set(map(type, parts)) == {Tensor}:
        return _write_counts(parts)
    return _write_counts([tensor for _, tensor in named_tensors(batch, "batch")])


def changed_in_place(batch: Any, versions: tuple[int, ...]) -> Iterator[str]:
    """Yield the names of the batch's tensors that were written since their versions were recorded."""
    names = [name for name, _ in named_tensors(batch, "batch")]
    if len(names) != len(versions):
        yield "batch (tensors were added or removed)"
        return
    for name, now, before in zip(names, versions_of(batch), versions, strict=True):
        if now != before:
            yield name


def _write_counts(tensors: Any) -> tuple[int, ...]:
    try:
        return tuple(map(WRITE_COUNT, tensors))  # without a loop in Python: it is asked in every step
    except (RuntimeError, ValueError):  # an inference tensor or an uninitialized parameter is among them
        return tuple(map(write_count_or_none, tensors))


def mark_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that undoes what schedulers do from now on to learning rates and other settings."""
    kept = [
        {key: each.clone() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    @torch.no_grad()
    def restore() -> None:
        for group, saved in zip(optimizer.param_groups, kept, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
                else:
                    group[key] = value

    return restore
