"""The guard in a plain training loop, without a Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.nonfinite import step_guard
from lightning_memtools.nonfinite.step_guard import GuardedStep, StepGuard, gradients_under
from tests.nonfinite.observe import differences


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU all steps are read before their update. Here a fused one takes the way of a GPU's, by a flag."""
    monkeypatch.setattr(step_guard, "reads_at_once", lambda _gradients: False)


class Loop:
    """A plain loop: model, fused optimizer, guard."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.guard = StepGuard(self.model, records=False)
        self.n = 0

    def step(self, *micro: Tensor) -> GuardedStep | None:
        for position, batch in enumerate(micro):
            self.guard.begin(batch, self.n, self.n, first=position == 0)
            loss = self.model(batch).square().mean() / len(micro)
            self.guard.loss(loss, divided_by=len(micro))
            if position == 0:
                self.optimizer.zero_grad()
            loss.backward()
        self.n += 1
        trip = self.guard.check(self.optimizer)
        if trip is None:
            self.guard.before_update(self.optimizer)
            self.optimizer.step()
        return trip

    def bits(self) -> dict[str, Tensor]:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            state |= {f"{index}.{name}": value.clone() for name, value in entries.items()}
        return state


def good() -> Tensor:
    return torch.randn(5, 3)


def dirty() -> Tensor:
    return torch.tensor([[1.0, torch.nan, 1.0]]).expand(5, 3)


def test_with_a_fused_kernel_finite_gradients_whose_squares_overflow_are_not_held_back():
    loop = Loop()
    loop.model[2].weight.register_hook(lambda gradient: torch.full_like(gradient, 1e20))
    assert loop.step(good()) is None
    assert loop.guard.drain() is None
    assert loop.model[2].weight.abs().min() > 1e18, "the update was not made"


def test_however_late_it_is_read_nothing_has_changed(monkeypatch):
    """As on a GPU that is far behind the host: nothing arrives for some steps."""
    loop = Loop()
    loop.step(good())
    loop.step(good())
    before = loop.bits()
    monkeypatch.setattr(loop.guard._flag, "read", lambda *, wait: [])
    for batch in (dirty(), good(), good(), dirty(), good()):
        assert loop.step(batch) is None
    monkeypatch.undo()
    trip = loop.guard.drain()
    assert trip.number == 2
    loop.guard.undo(trip)
    assert differences(before, loop.bits()) == []
    assert [past.step for past in loop.guard.history] == [0, 1, 2]


def test_gradients_of_a_step_that_is_read_late_are_named_by_their_norms():
    loop = Loop()
    loop.step(good())
    loop.step(dirty())
    trip = loop.step(good())
    assert [bad.name for bad in trip.gradients] == [name for name, _ in loop.model.named_parameters()]
    assert {str(bad).split("(")[1] for bad in trip.gradients} == {"holds NaN, not counted)"}


def test_older_batches_are_moved_to_the_host_until_they_are_read(monkeypatch):
    loop = Loop()
    loop.step(good())
    loop.step(good())
    monkeypatch.setattr(loop.guard._flag, "read", lambda *, wait: [])
    for _ in range(4):
        loop.step(good())
    moved = [micro.was_moved for step in loop.guard._flag.undecided() for micro in step.micro]
    assert moved == [True, True, True, False, False], "the present one and one more stay"


def test_an_immediate_step_waits_for_the_fused_optimizer_before_it():
    """Two optimizers, one of them fused: the other must not move once the first was held back."""
    torch.manual_seed(0)
    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    guard = StepGuard(nn.ModuleList([one, two]))
    fused, plain = torch.optim.SGD(one.parameters(), fused=True), torch.optim.SGD(two.parameters())
    before = two.weight.clone()
    guard.begin(None, 0, 0)
    for net, optimizer, batch in ((one, fused, dirty()), (two, plain, good())):
        loss = net(batch).mean()
        guard.loss(loss)
        loss.backward()
        trip = guard.check(optimizer, reopen=True)
        if trip is not None:
            break
        optimizer.step()
    assert trip.optimizer is fused
    assert torch.equal(two.weight, before)


@pytest.mark.parametrize(("world_size", "seen"), [(1, "whole"), (2, "sharded")])
def test_gradients_under_a_strategy_that_nobody_knows_are_taken_for_sharded_on_several_ranks(world_size, seen):
    assert gradients_under(type("NobodyKnows", (), {}), world_size=world_size) == seen
