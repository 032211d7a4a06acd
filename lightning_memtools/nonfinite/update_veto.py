"""Holds back an optimizer's update, on the device or by removing gradients; finds updates that made NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_memtools._torch import step_hooks_of
from lightning_memtools.memory.arriving_values import ArrivingValues
from lightning_memtools.memory.nested_tensors import names_of
from lightning_memtools.nonfinite.bad_step import UPDATE_OVERFLOWED
from lightning_memtools.nonfinite.diagnosis import bad_optimizer_state
from lightning_memtools.nonfinite.finite_checks import find_bad

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class DecidedStep(Generic[Note]):
    """The result of a step's check, when it has reached the host."""

    note: Note  # the note that was given to `check`
    bad: bool  # whether the step was found bad
    halts: bool  # whether it was one bad step too many: its update and all later ones were held back
    numbers: list[float]  # the numbers that were checked


class UpdateVeto(Generic[Note]):
    """Decides on the device whether a step may change anything, and tells the host when the answer has arrived.

    `flag` is a 0-dim float32 tensor, 1 where the step is held back, for `optimizer.found_inf`. It is sticky: after more
    than `max_skips` bad steps it stays 1, so that it does not matter how late the host learns of it.
    """

    def __init__(self, device: torch.device, max_skips: int) -> None:
        self.flag = torch.zeros((), device=device)
        self._n_bad = torch.zeros((), device=device)
        self._max_skips = max_skips
        self._sent: ArrivingValues[Note] = ArrivingValues()
        self._attached: list[Optimizer] = []

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, n_deciding: int, note: Note) -> None:
        """Skip the coming update if one of the first `n_deciding` numbers is NaN or Inf, without waiting."""
        bad = ~torch.isfinite(numbers[:n_deciding]).all()
        self._n_bad.add_(bad)
        halts = self._n_bad > self._max_skips
        # Exactly 0 or 1: the kernels subtract it from the step count.
        self.flag.copy_(bad | halts)
        self._attach(optimizer)
        verdict = torch.stack([bad.to(numbers.dtype), halts.to(numbers.dtype)])
        self._sent.send(torch.cat([verdict, numbers]), note)

    def _attach(self, optimizer: Optimizer) -> None:
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        if all(optimizer is not other for other in self._attached):
            self._attached.append(optimizer)

    def notes(self) -> Sequence[Note]:
        """Return the notes of the steps that are not read yet, oldest first."""
        return self._sent.notes()

    def read(self, *, wait: bool) -> list[DecidedStep[Note]]:
        """Return the steps whose results have arrived, oldest first; with `wait`, all of them."""
        return [
            DecidedStep(note, bool(bad), bool(halts), numbers)
            for (bad, halts, *numbers), note in self._sent.receive(wait=wait)
        ]

    def close(self) -> None:
        """Remove the flag from the optimizers. Idempotent."""
        for optimizer in self._attached:
            if getattr(optimizer, "found_inf", None) is self.flag:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._attached.clear()
        self._sent.clear()


def honours_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a step does nothing while `optimizer.found_inf`, a tensor on the device, is 1.

    PyTorch's fused kernels then leave every bit unchanged, step counts included. Subclasses and other packages'
    optimizers may not, and the float64 norms that decide on the device could overflow for float64 gradients.
    """
    if type(optimizer) not in {SGD, Adam, AdamW, Adagrad}:
        return False
    return all(
        group.get("fused")
        and all(p.device.type in {"cpu", "cuda"} and p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def bad_setting(optimizer: Optimizer) -> str:
    """Say which learning rate or other number of the optimizer is NaN, or which rate is infinite; else ""."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            # Asking each value whether it is a tensor would take longer.
            if type(value) is not float and (type(value) in _NO_NUMBERS or not _is_number_at_hand(value)):
                continue
            if not math.isfinite(value) and (key == "lr" or math.isnan(value)):
                return f"{key} of {type(optimizer).__name__} is {float(value)}"
    return ""


def _is_number_at_hand(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1  # on a device it would have to be waited for
    return isinstance(value, float)


_NO_NUMBERS = frozenset({bool, int, type(None), list, tuple, str})


def hide_gradients(optimizer: Optimizer) -> None:
    """Make the coming step do nothing: optimizers skip parameters without a gradient, and create no state for them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def over_ranks(numbers: Tensor | None, n_deciding: int, device: torch.device) -> Tensor:
    """Replace the norm of each rank's shard by the norm over all ranks, and let all ranks decide alike.

    This takes one all-reduce of two numbers, on the device and in the backend of training.

    Args:
        numbers: What `measure` returned on this rank, the norm first; None if this rank has no gradient and no loss.
        n_deciding: The number of leading numbers that decide.
        device: The device of training.

    Returns:
        The numbers, and one more at the end: NaN if a deciding number of any rank is NaN or Inf, else 0.
    """
    if numbers is None:
        numbers = torch.zeros(1, device=device, dtype=torch.float64)
    doubt = numbers[:n_deciding].sum(0, keepdim=True) * 0  # Inf times 0 is NaN
    shared = torch.cat([numbers[:1].square(), doubt])
    distributed.all_reduce(shared)
    return torch.cat([shared[:1].sqrt(), numbers[1:], shared[1:]])


def poison(loss: Tensor) -> None:
    """Make all gradients of this backward pass NaN if the loss is NaN or Inf; else leave every bit unchanged.

    Under data parallelism every rank sees the mean of all gradients, but only its own loss. The NaN tells all ranks of
    a bad loss without a collective or a wait.
    """
    if not loss.requires_grad:
        return
    value = loss.detach()
    factor = torch.where(torch.isfinite(value), 1.0, torch.nan).to(value.dtype)
    loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]


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
    """Say which state or setting made the last update bad; "" if it was not. Waits for the device."""
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
