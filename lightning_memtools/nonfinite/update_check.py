"""Finds updates that made NaN or Inf out of finite gradients, says what in them did, and can undo them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_memtools._torch import copy_each, step_hooks_of
from lightning_memtools.nonfinite.bad_step import UPDATE_OVERFLOWED
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state
from lightning_memtools.nonfinite.finite_checks import find_bad, floats_of
from lightning_memtools.nonfinite.tensor_names import names_of
from lightning_memtools.nonfinite.update_veto import StateKeys

_LARGE_GRADIENT, _LARGE_WEIGHT = 1e12, 1e20  # norms
_UPDATES_BETWEEN = 50


class WeightBounds:
    """Knows of PyTorch's own optimizers, on float32 and float64, that an update cannot make weights NaN or Inf.

    The change of a weight is at most the learning rate times the largest gradient since training began over `eps`. As
    long as these are far from the ends of float32, and the weights were when they were last looked at, nothing
    overflows within 50 updates: so the weights are read after one in 51 updates, instead of after each.
    """

    def __init__(self) -> None:
        self._n_left: dict[Optimizer, int] = {}

    def hold(self, optimizer: Optimizer, norm: float) -> bool:
        """Return whether the coming update, of gradients with this norm, is sure to leave the weights finite."""
        n_left = self._n_left.get(optimizer, 0)
        if (
            n_left
            and norm < _LARGE_GRADIENT
            and not step_hooks_of(optimizer)
            and all(map(_is_tame, optimizer.param_groups))
        ):
            self._n_left[optimizer] = n_left - 1
            return True
        self._n_left[optimizer] = 0
        return False

    def read(self, optimizer: Optimizer, norm: float, parameters: Sequence[Tensor]) -> None:
        """Note the norm of the weights after an update."""
        is_plain = type(optimizer) in {SGD, Adam, AdamW} and norm < _LARGE_WEIGHT
        types = {parameter.dtype for parameter in parameters} if is_plain else set()
        self._n_left[optimizer] = _UPDATES_BETWEEN if is_plain and types <= {torch.float32, torch.float64} else 0


def _is_tame(group: dict[str, Any]) -> bool:
    """Return whether the settings of a parameter group are in the usual ranges."""
    rate = group["lr"]
    # A rate that is a tensor may be on a device.
    return (
        type(rate) is float
        and 0 <= rate <= 1
        and 0 <= group["weight_decay"] <= 1
        and group.get("eps", 1) >= 1e-12  # noqa: PLR2004, far from the end of float32
        and 0 <= group.get("momentum", 0) < 0.999  # noqa: PLR2004
        and _are_usual(*group.get("betas", (0.9, 0.9)))
    )


def _are_usual(first: float, second: float) -> bool:
    # An average of squares that is infinite stays so unless it is multiplied by 0.
    return 0 <= first < 0.9999 and 0.5 < second < 0.9999  # noqa: PLR2004


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
