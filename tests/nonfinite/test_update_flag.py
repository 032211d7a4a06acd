"""The flag: what the fused kernels do with it, and how it stays set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memtools.nonfinite.step_guard import UpdateFlag, creates_state, honours_found_inf, mark_settings
from tests.nonfinite.observe import differences

FUSED = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "sgd with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, weight_decay=0.1, fused=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr_decay=0.1, fused=True),
}
every_fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def with_gradients(parameters: list[nn.Parameter], bad: float | None = None) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if bad is not None:
        assert parameters[0].grad is not None
        parameters[0].grad[1] = bad


def bits(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {f"{i}": p.detach().clone() for i, p in enumerate(parameters)}
    for i, p in enumerate(parameters):
        state |= {f"{i}.{k}": v.clone() for k, v in optimizer.state.get(p, {}).items() if v is not None}
    return state


def take(flag: UpdateFlag, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], note: Any) -> None:
    numbers = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None])
    flag.check(optimizer, numbers, slice(len(parameters)), note)
    optimizer.step()


@every_fused
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_changes_in_the_bad_step_nor_in_any_after_it(make, bad):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 3))]
    optimizer = make(parameters)
    flag = UpdateFlag()
    for note in range(3):
        with_gradients(parameters)
        take(flag, optimizer, parameters, note)
    before = bits(parameters, optimizer)
    with_gradients(parameters, bad)
    take(flag, optimizer, parameters, 3)
    for note in (4, 5):
        with_gradients(parameters)
        take(flag, optimizer, parameters, note)  # healthy again, and yet
    assert differences(before, bits(parameters, optimizer)) == []
    assert [(step, held) for step, held, _ in flag.read(wait=True)] == [(n, n >= 3) for n in range(6)]


def test_only_the_deciding_numbers_decide():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    flag = UpdateFlag()
    parameter.grad = torch.ones(2)
    flag.check(optimizer, torch.tensor([1.0, torch.nan]), slice(1), "loss of this rank alone")
    optimizer.step()
    assert parameter.tolist() == [0, 0]
    ((_, is_held_back, numbers),) = flag.read(wait=True)
    assert (is_held_back, numbers[0]) == (False, 1.0)


def test_an_update_that_creates_state_is_known():
    """Fused SGD leaves its momentum uninitialised while it is held back; the step after would use it."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for momentum in (0.0, 0.9):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=True)
        with_gradients(parameters[:1])
        assert creates_state(optimizer, parameters[:1]) == bool(momentum)
        optimizer.step()
        assert not creates_state(optimizer, parameters[:1])
        assert creates_state(optimizer, parameters) == bool(momentum)
        parameters[0].grad = None


def test_which_optimizers_honour_the_flag():
    def parameters(dtype=torch.float32):
        return [nn.Parameter(torch.ones(2, dtype=dtype))]

    assert all(honours_found_inf(make(parameters())) for make in FUSED.values())
    assert not honours_found_inf(torch.optim.AdamW(parameters()))
    assert not honours_found_inf(torch.optim.AdamW(parameters(), foreach=True))
    assert not honours_found_inf(torch.optim.RMSprop(parameters()))
    assert not honours_found_inf(torch.optim.AdamW(parameters(torch.float64), fused=True))

    class Mine(torch.optim.AdamW):
        """May do anything in its step."""

    assert not honours_found_inf(Mine(parameters(), fused=True))


def test_settings_come_back_also_where_they_are_tensors():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    restore = mark_settings(optimizer)
    rate.fill_(0.1)
    optimizer.param_groups[0]["betas"] = (0, 0)
    restore()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
