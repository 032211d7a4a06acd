"""Records what an optimizer's update begins with, and restores it: entries of its state, settings, copied tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memtools._torch import has_readable_values


class UpdateStart:
    """The state of an optimizer before an update.

    The keys of its state are always recorded: Adam creates zeros in its first step, but fused SGD leaves its momentum
    buffers uninitialised, and a step after one that was held back would use them.

    Args:
        optimizer: The optimizer.
        before: An earlier start of the same optimizer, if no key was added since: listing them takes time.
        copy: Copies a tensor that the update will write; None to copy none, so that `undo` must not be called.

    Attributes:
        keys: The keys of each parameter's state.
        n_entries: The number of states and keys, which is compared instead of all keys.
    """

    def __init__(
        self, optimizer: Optimizer, before: UpdateStart | None = None, *, copy: Callable[[Tensor], Tensor] | None = None
    ) -> None:
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
        if copy is None:
            return
        with torch.no_grad():
            self._copies = [(each, copy(each.detach())) for each in tensors_written_by(optimizer)]
        self._numbers = [
            (state, {key: value for key, value in state.items() if isinstance(value, (int, float))})
            for state in optimizer.state.values()
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

    @torch.no_grad()
    def undo(self) -> None:
        """Undo the update bit for bit, by the copies."""
        self.remove_new_state()
        for tensor, copied in self._copies:
            tensor.data.copy_(copied)
        for state, numbers in self._numbers:
            state.update(numbers)


def tensors_written_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that an update may write: parameters with a gradient, and the optimizer's state."""
    found = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []
    return [tensor for tensor in found if has_readable_values(tensor)]


def _count(optimizer: Optimizer) -> int:
    return sum(map(len, optimizer.state.values())) + len(optimizer.state)
