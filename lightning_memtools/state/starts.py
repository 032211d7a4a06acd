"""Records what an update begins with, to restore it: settings and new state; and which tensors were written since."""

from __future__ import annotations

from collections.abc import Iterator
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


class UpdateStart:
    """The state of an optimizer before an update.

    The keys of its state are always recorded: Adam creates zeros in its first step, but fused SGD leaves its momentum
    buffers uninitialised, and a step after one that was held back would use them.

    Args:
        optimizer: The optimizer.
        before: An earlier start of the same optimizer, if no key was added since: listing them takes time.

    Attributes:
        keys: The keys of each parameter's state.
        n_entries: The number of states and keys, which is compared instead of all keys.
    """

    def __init__(self, optimizer: Optimizer, before: UpdateStart | None = None) -> None:
        self._optimizer = optimizer
        self.n_entries: int
        self.keys: dict[Tensor, frozenset[str]]
        if before is not None:
            self.n_entries, self.keys = before.n_entries, before.keys
        else:
            self.n_entries = _count(optimizer)
            self.keys = {parameter: frozenset(state) for parameter, state in optimizer.state.items()}
        # Learning rates may be tensors.
        self._settings = [
            {key: each.clone() if isinstance(each, Tensor) else each for key, each in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def has_other_keys(self) -> bool:
        """Return whether an entry of the state was created or removed since."""
        return _count(self._optimizer) != self.n_entries

    def remove_new_state(self) -> None:
        """Remove the entries of the state that were created since."""
        if not self.has_other_keys():
            return
        for parameter in list(self._optimizer.state):
            known = self.keys.get(parameter)
            if known is None:
                del self._optimizer.state[parameter]
                continue
            state = self._optimizer.state[parameter]
            for key in [key for key in state if key not in known]:
                del state[key]

    @torch.no_grad()
    def restore_settings(self) -> None:
        """Undo what schedulers did to learning rates and other settings."""
        for group, saved in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
                else:
                    group[key] = value


def _count(optimizer: Optimizer) -> int:
    return sum(map(len, optimizer.state.values())) + len(optimizer.state)
