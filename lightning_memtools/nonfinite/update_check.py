"""Finds updates that made NaN or Inf out of finite gradients, says what in them did, and can undo them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools._torch import copy_each, step_hooks_of
from lightning_memtools.nonfinite.bad_step import UPDATE_OVERFLOWED
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state
from lightning_memtools.nonfinite.finite_checks import find_bad, floats_of
from lightning_memtools.nonfinite.tensor_names import names_of
from lightning_memtools.nonfinite.update_veto import StateKeys


def why_update_is_bad(
    model: Module, step: int, optimizer: Optimizer, parameters: Sequence[Tensor], bad_before: Collection[str] = ()
) -> str:
    """Say which state or setting made the last update bad; "" if it was not. Waits for the device.

    Args:
        model: The module, which knows the names.
        step: The training step.
        optimizer: The optimizer.
        parameters: The parameters that it has updated.
        bad_before: The names of those that were bad before.
    """
    names = names_of(model, parameters)
    bad = [each for each in find_bad(zip(names, parameters, strict=True)) if each.name not in bad_before]
    if not bad:
        return ""
    found = {id(p) for p, name in zip(parameters, names, strict=True) if name == bad[0].name}
    group = next(group for group in optimizer.param_groups if found & set(map(id, group["params"])))
    kind, dtype = type(optimizer).__name__, next(p.dtype for p in group["params"] if id(p) in found)
    states = bad_optimizer_state(model, [optimizer])
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook in step_hooks_of(optimizer)]
    eps = group.get("eps")
    if isinstance(eps, float) and not group.get("fused") and not torch.tensor(eps, dtype=dtype):
        why = (
            f"eps={eps:g} of {kind} is 0 in {str(dtype).removeprefix('torch.')}, so that it divides by 0 where the "
            "average of squares is 0 too (use a larger eps, a fused optimizer, or weights in float32)"
        )
    elif states:
        why = f"its state {states[0]} is not finite (learning rate {_rate(group)})"
    elif hooks:
        why = f"{kind} calls {', '.join(hooks)} after its step, which may have made it"
    elif not type(optimizer).__module__.startswith("torch.optim"):
        why = f"the arithmetic of {kind}.step made it (learning rate {_rate(group)})"
    else:
        why = f"{UPDATE_OVERFLOWED} at a learning rate of {_rate(group)}"
    return f"{bad[0]} is not finite after the update of step {step} by {kind}: {why}"


def _rate(group: dict[str, Any]) -> str:
    return f"{float(group['lr']):g}" if "lr" in group else "not known"


class UpdateCopies:
    """Copies of an optimizer's parameters and state from before an update, to undo it.

    Args:
        optimizer: The optimizer.
        parameters: The parameters that it will update.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._keys = StateKeys(optimizer)
        self._tensors = [t for t in (*parameters, *_state_of(optimizer)) if floats_of(t) is not None]
        with torch.no_grad():
            self._copies = [tensor.detach().clone() for tensor in self._tensors]
        self._numbers = [
            (state, {key: value for key, value in state.items() if isinstance(value, (int, float))})
            for state in optimizer.state.values()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the update."""
        self._keys.restore()
        copy_each([tensor.data for tensor in self._tensors], self._copies)
        for state, numbers in self._numbers:
            state.update(numbers)


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
