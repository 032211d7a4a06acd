"""What a step can do to an optimizer, and how to hold it back or undo it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether `optimizer.found_inf`, a device tensor that is 1, makes the step leave everything as it is.

    PyTorch's fused kernels do, bit for bit, step counts included. Subclasses and other packages' optimizers may not
    keep to that, and the float64 norms that decide on the device could overflow for float64 gradients.
    """
    if type(optimizer) not in {SGD, Adam, AdamW, Adagrad}:
        return False
    return all(
        group.get("fused")
        and all(p.device.type in {"cpu", "cuda"} and p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def hide_gradients(optimizer: Optimizer) -> None:
    """Make the coming step do nothing: optimizers leave parameters without a gradient alone, and create no state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class StateKeys:
    """Which state an optimizer had before a step, to remove what a vetoed first step created.

    Adam's is zeros then, but fused SGD leaves its momentum buffers uninitialised, and the next step would use them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._n_entries = _count(optimizer)
        self._keys = {parameter: frozenset(state) for parameter, state in optimizer.state.items()}

    def are_current(self) -> bool:
        """Whether nothing was created or removed since."""
        return _count(self._optimizer) == self._n_entries

    def put_back(self) -> bool:
        """Remove what was created since; whether there was anything."""
        if self.are_current():
            return False
        for parameter in list(self._optimizer.state):
            known = self._keys.get(parameter)
            if known is None:
                del self._optimizer.state[parameter]
                continue
            state = self._optimizer.state[parameter]
            for key in [key for key in state if key not in known]:
                del state[key]
        return True


def _count(optimizer: Optimizer) -> int:
    return sum(map(len, optimizer.state.values())) + len(optimizer.state)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The learning rates and other settings of each parameter group, as copies."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def put_settings_back(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Undo what schedulers did to the parameter groups since `settings_of`."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
            else:
                group[key] = value
