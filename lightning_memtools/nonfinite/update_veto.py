"""Holds an optimizer's update back, on the device or by hiding gradients, and undoes what it did."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, distributed
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class Reading(Generic[Note]):
    """What a step's check found, read later.

    Attributes:
        note: What was given to `check`.
        bad: Whether the step was found bad.
        halts: Whether it was one bad step too many: nothing moved in it or after it.
        numbers: The numbers that were checked.
    """

    note: Note
    bad: bool
    halts: bool
    numbers: list[float]


@dataclass(slots=True)
class _Pending(Generic[Note]):
    note: Note
    numbers: Tensor
    arrival: torch.cuda.Event | None


class Veto(Generic[Note]):
    """Decides on the device whether a step may move anything, and tells the host when the answer has arrived.

    `flag` is a 0-dim float32 tensor, 1 where the step is held back, for `optimizer.found_inf`. It is sticky: after more
    than `max_skips` bad steps it stays 1, so that it does not matter how late the host learns of it.

    Args:
        device: Where the gradients are.
        max_skips: How many bad steps are held back without ending the run.
    """

    def __init__(self, device: torch.device, max_skips: int) -> None:
        self.flag = torch.zeros((), device=device)
        self._n_bad = torch.zeros((), device=device)
        self._max_skips = max_skips
        self._pending: deque[_Pending[Note]] = deque()
        self._attached: list[Optimizer] = []

    @torch.no_grad()
    def check(self, optimizer: Optimizer, numbers: Tensor, n_deciding: int, note: Note) -> None:
        """Hold the coming step back if one of the first `n_deciding` numbers is NaN or Inf. Does not wait."""
        bad = ~torch.isfinite(numbers[:n_deciding]).all()
        self._n_bad.add_(bad)
        halts = self._n_bad > self._max_skips
        # Exactly 0 or 1: the kernels subtract it from the step count.
        self.flag.copy_(bad | halts)
        optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        if all(optimizer is not other for other in self._attached):
            self._attached.append(optimizer)
        verdict = torch.stack([bad.to(numbers.dtype), halts.to(numbers.dtype)])
        self._pending.append(self._send(torch.cat([verdict, numbers]), note))

    def notes(self) -> Sequence[Note]:
        """The notes of the steps not yet read, oldest first."""
        return [pending.note for pending in self._pending]

    def read(self, *, wait: bool) -> list[Reading[Note]]:
        """What has arrived since, oldest first; with `wait`, everything."""
        readings = []
        while self._pending:
            pending = self._pending[0]
            if pending.arrival is not None and not pending.arrival.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                pending.arrival.synchronize()
            self._pending.popleft()
            bad, halts, *numbers = pending.numbers.tolist()
            readings.append(Reading(pending.note, bool(bad), bool(halts), numbers))
        return readings

    def close(self) -> None:
        """Take the flag off the optimizers; closing twice does no harm."""
        for optimizer in self._attached:
            if getattr(optimizer, "found_inf", None) is self.flag:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._attached.clear()
        self._pending.clear()

    @staticmethod
    def _send(numbers: Tensor, note: Note) -> _Pending[Note]:
        if numbers.device.type != "cuda":
            return _Pending(note, numbers, None)
        # Only a copy into pinned memory leaves the host free to go on.
        arrived = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        arrived.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(numbers.device))
        return _Pending(note, arrived, event)


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


def over_ranks(numbers: Tensor | None, n_deciding: int, device: torch.device) -> Tensor:
    """Make the first of each rank's numbers, the norm of its shard, that of all ranks, and let all ranks decide alike.

    One all-reduce of two numbers, on the device and in the backend of training.

    Args:
        numbers: What `measure` gave on this rank; None where it holds nothing.
        n_deciding: How many of the first numbers decide.
        device: Where training takes place.

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
    """Make all gradients of this backward pass NaN if the loss is NaN or Inf; leave them bit for bit alone if not.

    Under data parallelism every rank sees the mean of all gradients, but only its own loss. This carries a bad loss to
    all of them without a collective or a wait.
    """
    if not loss.requires_grad:
        return
    value = loss.detach()
    factor = torch.where(torch.isfinite(value), 1.0, torch.nan).to(value.dtype)
    loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
