"""Holds back an optimizer's update, on the device or by removing gradients, and undoes what a step did to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, distributed
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_memtools.memory.arriving_values import ArrivingValues

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class DecidedStep(Generic[Note]):
    """The result of a step's check, when it has reached the host.

    Attributes:
        note: The note that was given to `check`.
        bad: Whether the step was found bad.
        halts: Whether it was one bad step too many: its update and all later ones were held back.
        numbers: The numbers that were checked.
    """

    note: Note
    bad: bool
    halts: bool
    numbers: list[float]


class UpdateVeto(Generic[Note]):
    """Decides on the device whether a step may change anything, and tells the host when the answer has arrived.

    `flag` is a 0-dim float32 tensor, 1 where the step is held back, for `optimizer.found_inf`. It is sticky: after more
    than `max_skips` bad steps it stays 1, so that it does not matter how late the host learns of it.

    Args:
        device: The gradients' device.
        max_skips: The number of bad steps that are skipped without ending the run.
    """

    def __init__(self, device: torch.device, max_skips: int) -> None:
        self.flag = torch.zeros((), device=device)
        self._n_bad = torch.zeros((), device=device)
        self._max_skips = max_skips
        self._sent: ArrivingValues[Note] = ArrivingValues()
        self._attached: list[Optimizer] = []

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, n_deciding: int, note: Note) -> None:
        """Hold the coming step back if one of the first `n_deciding` numbers is NaN or Inf. Does not wait."""
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
        """Remove the flag from the optimizers; closing twice does no harm."""
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


class StateKeys:
    """The keys of an optimizer's state before a step, to remove the state that a first step created but did not fill.

    Adam creates zeros, but fused SGD leaves its momentum buffers uninitialised, and the next step would use them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._n_entries = _count(optimizer)
        self._keys = {parameter: frozenset(state) for parameter, state in optimizer.state.items()}

    def are_current(self) -> bool:
        """Return whether no entry was created or removed since."""
        return _count(self._optimizer) == self._n_entries

    def restore(self) -> bool:
        """Remove the entries that were created since; return whether there were any."""
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
    """Return copies of the learning rates and other settings of each parameter group."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def restore_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Undo what schedulers did to the parameter groups since `settings_of`."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key].copy_(value)  # schedulers write into a learning rate that is a tensor
            else:
                group[key] = value


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
